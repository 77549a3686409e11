//! Tensors as the Open Inference Protocol writes them in JSON: a name, a shape, a datatype, and the
//! elements, flat or nested.

use std::fmt;

use serde::de::{DeserializeSeed, Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use skep_data::{Column, Table};
use skep_learn::Input;
use skep_wire::Dtype;

use crate::{ApiError, Model};

/// A tensor of a request.
#[derive(Debug, Deserialize)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) datatype: String,
    pub(crate) data: Elements,
}

/// Elements, taken out of whatever lists they lie in.
#[derive(Debug, Default)]
pub(crate) struct Elements {
    numbers: Vec<f32>,
    texts: Vec<String>,
}

impl<'de> Deserialize<'de> for Elements {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut elements = Self::default();
        Into(&mut elements).deserialize(deserializer)?;
        Ok(elements)
    }
}

/// Adds what is read to the elements: lists of millions never become trees of values.
struct Into<'elements>(&'elements mut Elements);

impl<'de> DeserializeSeed<'de> for Into<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Into<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("numbers or texts, or lists of them")
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<(), E> {
        self.0.numbers.push(number as f32);
        Ok(())
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<(), E> {
        self.visit_f64(number as f64)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<(), E> {
        self.visit_f64(number as f64)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.0.texts.push(text.to_owned());
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(Into(&mut *self.0))?.is_some() {}
        Ok(())
    }
}

/// What a model takes, in the protocol's words: name, datatypes (the first is the one to show) and
/// the shape of a row.
pub(crate) fn input_of(model: &Model) -> (String, &'static [&'static str], Vec<usize>) {
    match &model.inference.input {
        Input::Image { column, shape, .. } => (column.clone(), &["FP32", "UINT8"], shape.to_vec()),
        _ => ("text".to_owned(), &["BYTES"], vec![]),
    }
}

/// A batch from the tensors of a request.
pub(crate) fn batch(model: &Model, tensors: Vec<Tensor>) -> Result<(Table, usize), ApiError> {
    let (name, datatypes, row) = input_of(model);
    let hint = || {
        let sides: Vec<_> = row.iter().map(usize::to_string).collect();
        format!(
            "the input is `{name}`, {}, shape [rows, {}]",
            datatypes.join(" or "),
            sides.join(", ")
        )
    };
    let refuse = |what: String| ApiError::bad(what, hint());
    let [tensor] = <[Tensor; 1]>::try_from(tensors)
        .map_err(|tensors| refuse(format!("there are {} inputs, not one", tensors.len())))?;
    let Tensor { name: given, shape, datatype, data } = tensor;
    if given != name {
        return Err(refuse(format!("there is no input `{given}`")));
    }
    if !datatypes.contains(&datatype.as_str()) {
        return Err(refuse(format!("`{name}` is {datatype}")));
    }
    let Some((&rows, rest)) = shape.split_first() else {
        return Err(refuse(format!("`{name}` has no rows")));
    };
    // A single channel may be left out, and a text may stand in a column.
    let without_channel = row.first() == Some(&1) && rest == &row[1..];
    let column_of_texts = row.is_empty() && rest == [1];
    if rest != row && !without_channel && !column_of_texts {
        return Err(refuse(format!("`{name}` has shape {shape:?}")));
    }
    let per_row: usize = row.iter().product();
    let expected = rows.saturating_mul(per_row);
    let found = if datatype == "BYTES" { data.texts.len() } else { data.numbers.len() };
    if rows == 0 || found != expected || data.texts.len() + data.numbers.len() != found {
        return Err(refuse(format!("shape {shape:?} needs {expected} elements, not {found}")));
    }
    if datatype == "BYTES" {
        return Ok((model.batch_of_texts(&data.texts)?, rows));
    }
    let (dtype, bytes): (_, Vec<u8>) = if datatype == "UINT8" {
        let bad = data.numbers.iter().find(|n| **n < 0.0 || **n > 255.0 || n.fract() != 0.0);
        if let Some(bad) = bad {
            return Err(refuse(format!("{bad} is not a UINT8")));
        }
        (Dtype::U8, data.numbers.iter().map(|&number| number as u8).collect())
    } else {
        if data.numbers.iter().any(|number| !number.is_finite()) {
            return Err(refuse("a number is not finite".to_owned()));
        }
        (Dtype::F32, data.numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
    };
    let column = Column { name, dtype, shape: row, bytes };
    let table = Table::new(vec![column]).map_err(|error| ApiError::bad(error.to_string(), ""))?;
    Ok((table, rows))
}
