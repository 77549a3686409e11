//! `skep model average`: one model of many, by the weighted mean of their numbers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use skep_data::model_file::{self, Average};
use skep_data::{LoadedTensor, ModelFile, ModelFormat};
use skep_learn::onnx;

use crate::cli::runtime;
use crate::failure::Failure;
use crate::progress::{bar, thousands};
use skep_serve::found::{FoundModel, RUN, SAMPLES, SETTINGS, VERSION};

/// What to average, and where to.
#[derive(Args, Clone, Debug)]
pub(crate) struct AverageFlags {
    /// Model files, all of one format
    #[arg(value_name = "FILE", required_unless_present = "dir")]
    files: Vec<PathBuf>,
    /// A folder, of which all model files are taken, in the order of their names
    #[arg(long, value_name = "DIR", conflicts_with = "files")]
    dir: Option<PathBuf>,
    /// Where the average goes; its ending says in which format
    #[arg(long, value_name = "FILE")]
    save: PathBuf,
    /// How much each model counts, such as 3,1,1; or `samples`, as many as it has learned from
    #[arg(long, value_name = "WEIGHTS")]
    weights: Option<String>,
    /// Say what was done as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn average(flags: &AverageFlags) -> Result<ExitCode, Failure> {
    let format = format_of_name(&flags.save)?;
    let files = match &flags.dir {
        Some(folder) => model_files(folder, &flags.save)?,
        None => flags.files.clone(),
    };
    if files.len() < 2 {
        let found: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
        let place =
            flags.dir.as_ref().map_or(String::new(), |dir| format!(" in {}", dir.display()));
        let what = if found.is_empty() {
            format!("there are no model files{place}")
        } else {
            format!("there is one model file alone{place}: {}", found.join(""))
        };
        return Err(Failure::mistake(what)
            .hint(format!("an average needs two or more of {}", ModelFormat::KNOWN)));
    }
    let weights = weights(flags.weights.as_deref(), &files)?;
    let progress = bar(files.len() as u64, "averaging {wide_bar:.yellow/238} {pos}/{len} files");
    let mut average = Average::default();
    let mut first: Option<First> = None;
    for (path, &weight) in files.iter().zip(&weights) {
        let name = path.to_string_lossy();
        let bytes = model_file::read_bytes(path)?;
        let mut file = model_file::read(&name, &bytes)?;
        if let Some(First { file: first, .. }) = &first
            && first.format != file.format
        {
            let first_name = files[0].display();
            return Err(Failure::mistake(format!(
                "{name} is a {} file, but {first_name} is a {} file",
                file.format, first.format
            ))
            .hint("bring all to one format with `skep model convert`"));
        }
        if let Some(First { file: first, .. }) = &first {
            same_metadata(first, &file, &name, &files[0].to_string_lossy())?;
        }
        if file.tensors.is_empty() {
            return Err(Failure::mistake(format!("{name} has no tensors")));
        }
        let optimiser = file.take_optimiser();
        average.add(&name, std::mem::take(&mut file.tensors), weight);
        first.get_or_insert(First { file, bytes, optimiser });
        progress.inc(1);
    }
    progress.finish_and_clear();
    let mut tensors = average.finish()?;
    let Some(First { file: first, bytes, optimiser }) = first else {
        return Err(Failure::fault("no models"));
    };
    let numbers: usize = tensors.values().map(|tensor| tensor.elements()).sum();
    let count = tensors.len();
    tensors.extend(optimiser);
    let mut metadata = first.metadata;
    // What was true of the first alone.
    for key in [RUN, VERSION, SAMPLES] {
        metadata.remove(key);
    }
    if first.format != ModelFormat::Safetensors {
        metadata.clear();
    }
    let like = (format == first.format).then_some(&bytes[..]);
    let encoded = model_file::encode(format, &tensors, &metadata, like)?;
    model_file::save(&flags.save, &encoded)?;
    let total: f64 = weights.iter().sum();
    if flags.json {
        let models = files.iter().zip(&weights);
        let models: Vec<_> = models
            .map(
                |(file, weight)| json!({ "file": file, "weight": weight, "share": weight / total }),
            )
            .collect();
        println!(
            "{}",
            json!({ "saved": flags.save, "models": models, "tensors": count, "numbers": numbers })
        );
    } else {
        for (file, weight) in files.iter().zip(&weights) {
            println!("{:>6.2} %  {}", 100.0 * weight / total, file.display());
        }
        println!(
            "average of {} models, {} tensors, {} numbers: {}",
            files.len(),
            count,
            thousands(numbers as u64),
            flags.save.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Numbers that stand for other words, or belong to another kind of model, have no mean.
fn same_metadata(
    first: &ModelFile,
    other: &ModelFile,
    name: &str,
    first_name: &str,
) -> Result<(), Failure> {
    for (key, what) in
        [(onnx::KIND, "kind"), (SETTINGS, "settings"), (onnx::VOCABULARY, "vocabulary")]
    {
        let both = first.metadata.get(key).zip(other.metadata.get(key));
        if both.is_some_and(|(first, other)| first != other) {
            return Err(Failure::mistake(format!(
                "{name} says another {what} of itself than {first_name} (`{key}`)"
            ))
            .hint(
                "`skep model inspect` shows it; models of the same data and settings have a mean",
            ));
        }
    }
    Ok(())
}

/// The file whose structure the average takes over.
struct First {
    file: ModelFile,
    bytes: Vec<u8>,
    /// What Keras keeps for going on with training: the mean of several has no meaning.
    optimiser: BTreeMap<String, LoadedTensor>,
}

/// The format that a name asks for.
pub(super) fn format_of_name(path: &Path) -> Result<ModelFormat, Failure> {
    ModelFormat::of_name(path).ok_or_else(|| {
        Failure::mistake(format!("{} has no ending that says what to write", path.display()))
            .hint(format!("{} are known", ModelFormat::KNOWN))
    })
}

/// The model files of a folder in the order of their names, whatever order the disk has. The one
/// that is about to be written is none of them.
fn model_files(folder: &Path, save: &Path) -> Result<Vec<PathBuf>, Failure> {
    let explain =
        |error: std::io::Error| Failure::mistake(format!("{}: {error}", folder.display()));
    let own = std::fs::canonicalize(save).ok();
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(explain)? {
        let path = entry.map_err(explain)?.path();
        let hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.'));
        let is_own = own.is_some() && std::fs::canonicalize(&path).ok() == own;
        if path.is_file() && !hidden && !is_own && ModelFormat::of_name(&path).is_some() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn weights(text: Option<&str>, files: &[PathBuf]) -> Result<Vec<f64>, Failure> {
    let weights: Vec<f64> = match text {
        None => vec![1.0; files.len()],
        Some("samples") => samples(files)?,
        Some(text) => {
            let number = |part: &str| {
                let number = part.trim().parse::<f64>().ok();
                let number = number.filter(|number| number.is_finite() && *number >= 0.0);
                number.ok_or_else(|| {
                    Failure::mistake(format!("`{part}` in --weights is no weight"))
                        .hint("numbers from 0 up, such as 3,1,1, or the word `samples`")
                })
            };
            text.split(',').map(number).collect::<Result<_, _>>()?
        }
    };
    if weights.len() != files.len() {
        let names: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
        return Err(Failure::mistake(format!(
            "{} weights for {} models",
            weights.len(),
            files.len()
        ))
        .hint(format!("they go to {}", names.join(", "))));
    }
    if weights.iter().sum::<f64>() <= 0.0 {
        return Err(Failure::mistake("the weights are all 0"));
    }
    Ok(weights)
}

/// How many samples each model has learned from, as its metadata or the run it lies in says.
fn samples(files: &[PathBuf]) -> Result<Vec<f64>, Failure> {
    runtime(1)?.block_on(async {
        let mut found = Vec::new();
        for file in files {
            let model = FoundModel::open(&file.to_string_lossy()).await?;
            let samples = model.samples.ok_or_else(|| {
                Failure::mistake(format!(
                    "{} does not say how many samples it has learned from",
                    file.display()
                ))
                .hint("models of a run and those that `skep model pull` wrote do; or give numbers")
            })?;
            found.push(samples as f64);
        }
        Ok(found)
    })
}
