//! The weighted mean of models.
//!
//! Sums are kept in 64 bits and taken in the order in which models come, so the same models in the
//! same order give the same bits. A tensor that is the same in every model stays as it is, to the
//! bit. Of others, floats become the mean, and whole numbers, such as BatchNorm's count of batches,
//! the mean rounded to the nearest (a half to the even one). Truth values have no mean, and numbers
//! that are not finite would spoil all others: both are told.

use std::collections::{BTreeMap, BTreeSet};

use skep_wire::Dtype;

use crate::{DataError, LoadedTensor};

/// How many differences of a file are listed.
const MOST_LISTED: usize = 12;

/// A mean in the making: one model is in memory at a time, besides the sums and the first.
#[derive(Debug, Default)]
pub struct Average {
    /// What all others are held against.
    first: BTreeMap<String, LoadedTensor>,
    first_name: String,
    sums: BTreeMap<String, Vec<f64>>,
    /// The tensors that are not the same in all models.
    changing: BTreeSet<String>,
    total: f64,
    models: usize,
    troubles: Vec<(String, Vec<String>)>,
}

impl Average {
    /// Adds a model with its weight. What is wrong with it is kept for [`Average::finish`], so that
    /// all files are looked at before any is complained of.
    pub fn add(&mut self, name: &str, tensors: BTreeMap<String, LoadedTensor>, weight: f64) {
        let is_first = self.models == 0;
        self.models += 1;
        let mut troubles = if is_first { Vec::new() } else { self.differences(&tensors) };
        let fits = troubles.is_empty();
        for (tensor_name, tensor) in &tensors {
            let same = self.first.get(tensor_name).is_some_and(|first| first.bytes == tensor.bytes);
            let Some(values) = tensor.values() else {
                if !same && !is_first {
                    troubles.push(format!("`{tensor_name}`: {:?} has no mean", tensor.dtype));
                }
                continue;
            };
            let strange = values.iter().filter(|value| !value.is_finite()).count();
            if strange > 0 {
                troubles.push(format!(
                    "`{tensor_name}` has {strange} of {} numbers that are not finite",
                    values.len()
                ));
            } else if tensor.dtype == Dtype::BOOL && !same && !is_first {
                troubles.push(format!("`{tensor_name}` has other truth values"));
            } else if fits {
                self.sum(tensor_name, &values, weight);
                if !same && !is_first {
                    self.changing.insert(tensor_name.clone());
                }
            }
        }
        self.total += weight;
        if !troubles.is_empty() {
            self.troubles.push((name.to_owned(), troubles));
        }
        if is_first {
            name.clone_into(&mut self.first_name);
            self.first = tensors;
        }
    }

    fn sum(&mut self, name: &str, values: &[f64], weight: f64) {
        let sum = self.sums.entry(name.to_owned()).or_insert_with(|| vec![0.0; values.len()]);
        for (sum, value) in sum.iter_mut().zip(values) {
            *sum += weight * value;
        }
    }

    /// Names, types and shapes that are not the first model's.
    fn differences(&self, tensors: &BTreeMap<String, LoadedTensor>) -> Vec<String> {
        let mut differences = Vec::new();
        for (name, first) in &self.first {
            let difference = match tensors.get(name) {
                None => format!("`{name}` is missing"),
                Some(other) if other.shape != first.shape => {
                    format!("`{name}` has shape {:?}, not {:?}", other.shape, first.shape)
                }
                Some(other) if other.dtype != first.dtype => {
                    format!("`{name}` is {:?}, not {:?}", other.dtype, first.dtype)
                }
                Some(_) => continue,
            };
            differences.push(difference);
        }
        let extra = tensors.keys().filter(|name| !self.first.contains_key(*name));
        differences.extend(extra.map(|name| format!("`{name}` is not in `{}`", self.first_name)));
        differences
    }

    /// The mean; everything that was in its way, file by file, otherwise.
    pub fn finish(self) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
        if !self.troubles.is_empty() {
            return Err(DataError::NoAverage {
                first: self.first_name,
                files: list(self.troubles),
            });
        }
        let total = self.total;
        let mean = |(name, first): (String, LoadedTensor)| {
            let tensor = match self.sums.get(&name).filter(|_| self.changing.contains(&name)) {
                Some(sum) => {
                    let mean: Vec<f64> = sum.iter().map(|sum| sum / total).collect();
                    first.with_values(&mean)
                }
                None => first,
            };
            (name, tensor)
        };
        Ok(self.first.into_iter().map(mean).collect())
    }
}

/// A few lines a file.
fn list(troubles: Vec<(String, Vec<String>)>) -> String {
    let mut text = String::new();
    for (file, mut lines) in troubles {
        let more = lines.len().saturating_sub(MOST_LISTED);
        lines.truncate(MOST_LISTED);
        text.push_str(&format!("\n  {file}:"));
        for line in lines {
            text.push_str(&format!("\n    {line}"));
        }
        if more > 0 {
            text.push_str(&format!("\n    and {more} more"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(values: &[f32]) -> LoadedTensor {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        LoadedTensor { dtype: Dtype::F32, shape: vec![values.len()], bytes }
    }

    fn count(value: i64) -> LoadedTensor {
        LoadedTensor { dtype: Dtype::I64, shape: vec![], bytes: value.to_le_bytes().to_vec() }
    }

    fn model(tensors: &[(&str, LoadedTensor)]) -> BTreeMap<String, LoadedTensor> {
        tensors.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect()
    }

    fn average(
        models: &[(BTreeMap<String, LoadedTensor>, f64)],
    ) -> Result<BTreeMap<String, LoadedTensor>, DataError> {
        let mut average = Average::default();
        for (at, (model, weight)) in models.iter().enumerate() {
            average.add(&format!("m{at}"), model.clone(), *weight);
        }
        average.finish()
    }

    #[test]
    fn floats_become_the_weighted_mean_and_counts_its_nearest() {
        let first = model(&[("w", floats(&[1.0, -2.0])), ("n", count(10))]);
        let second = model(&[("w", floats(&[5.0, 2.0])), ("n", count(13))]);
        let mean = average(&[(first.clone(), 3.0), (second.clone(), 1.0)]).expect("fits");
        assert_eq!(mean, model(&[("w", floats(&[2.0, -1.0])), ("n", count(11))]));
        let mean = average(&[(first, 1.0), (second, 1.0)]).expect("fits");
        assert_eq!(mean["n"], count(12), "11.5 goes to the even one");
    }

    #[test]
    fn what_is_the_same_everywhere_stays_to_the_bit() {
        let odd = model(&[
            ("w", floats(&[0.1, f32::MIN_POSITIVE / 4.0, -0.0])),
            ("n", count((1 << 60) + 1)),
            ("f", LoadedTensor { dtype: Dtype::BOOL, shape: vec![2], bytes: vec![1, 0] }),
        ]);
        let weights = [0.1, 0.7, 0.3];
        assert_eq!(average(&weights.map(|weight| (odd.clone(), weight))).expect("fits"), odd);
    }

    #[test]
    fn sums_have_more_bits_than_the_numbers() {
        let big = model(&[("w", floats(&[1e8]))]);
        let small = model(&[("w", floats(&[1.0]))]);
        let models: Vec<_> = std::iter::once(big).chain(vec![small; 7]).map(|m| (m, 1.0)).collect();
        let expected = (1e8 + 7.0) / 8.0;
        assert_eq!(average(&models).expect("fits")["w"], floats(&[expected as f32]));
    }

    #[test]
    fn everything_in_the_way_is_listed_file_by_file() {
        let first = model(&[("w", floats(&[1.0])), ("n", count(1))]);
        let other = model(&[("w", floats(&[1.0, 2.0])), ("x", count(1))]);
        let bad = model(&[("w", floats(&[f32::NAN])), ("n", count(1))]);
        let error = average(&[(first, 1.0), (other, 1.0), (bad, 1.0)]).expect_err("differ");
        let text = error.to_string();
        for part in [
            "m1:",
            "`w` has shape [2], not [1]",
            "`n` is missing",
            "`x` is not in `m0`",
            "m2:",
            "`w` has 1 of 1 numbers that are not finite",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let many = (0..40).map(|at| format!("t{at}"));
        let many: Vec<_> = many.map(|name| (name, count(0))).collect();
        let error = average(&[(many.into_iter().collect(), 1.0), (BTreeMap::new(), 1.0)]);
        assert!(error.expect_err("differ").to_string().contains("and 28 more"));
    }
}
