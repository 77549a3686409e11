//! `skep model convert`: the same numbers in another format.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use skep_data::{ModelFormat, model_file};

use super::average::format_of_name;
use crate::failure::Failure;

/// From which file to which.
#[derive(Args, Clone, Debug)]
pub(crate) struct ConvertFlags {
    /// A model file
    #[arg(value_name = "FROM")]
    from: PathBuf,
    /// Where it goes; its ending says in which format
    #[arg(value_name = "TO")]
    to: PathBuf,
    /// A Keras model of the same layers, whose structure the result takes over
    #[arg(long, value_name = "FILE")]
    like: Option<PathBuf>,
}

pub(crate) fn convert(flags: &ConvertFlags) -> Result<ExitCode, Failure> {
    let format = format_of_name(&flags.to)?;
    let from = flags.from.to_string_lossy();
    let bytes = model_file::read_bytes(&flags.from)?;
    let file = model_file::read(&from, &bytes)?;
    let like = match &flags.like {
        Some(path) => {
            let bytes = model_file::read_bytes(path)?;
            let form = model_file::read(&path.to_string_lossy(), &bytes)?.format;
            if form != format || !matches!(form, ModelFormat::Hdf5 | ModelFormat::Keras) {
                return Err(Failure::mistake(format!(
                    "--like {} is a {form} file, and {} becomes a {format} file",
                    path.display(),
                    flags.to.display()
                ))
                .hint("--like is for .h5 and .keras files, and of the same kind"));
            }
            Some(bytes)
        }
        // The same format keeps its structure.
        None => (file.format == format).then_some(bytes),
    };
    if format == ModelFormat::Keras && like.is_none() {
        return Err(Failure::mistake("tensors alone are no Keras model")
            .hint("give one of the same layers to fill, with --like MODEL.keras"));
    }
    let mut metadata = file.metadata;
    if file.format != ModelFormat::Safetensors {
        metadata.clear();
    }
    let encoded = model_file::encode(format, &file.tensors, &metadata, like.as_deref())?;
    model_file::save(&flags.to, &encoded)?;
    println!(
        "{} tensors from {} ({}) to {} ({format})",
        file.tensors.len(),
        flags.from.display(),
        file.format,
        flags.to.display()
    );
    if !metadata.is_empty() && format != ModelFormat::Safetensors {
        eprintln!("note: its metadata stays behind; only safetensors files have a place for it");
    }
    Ok(ExitCode::SUCCESS)
}
