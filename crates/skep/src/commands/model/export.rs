//! `skep model export`: a trained model for other runtimes.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use skep_data::model_file;
use skep_learn::Task;

use crate::cli::runtime;
use crate::failure::Failure;
use crate::progress::thousands;
use skep_serve::found::FoundModel;

/// What to export, and where to.
#[derive(Args, Clone, Debug)]
pub(crate) struct ExportFlags {
    /// A model file, or STORE/RUN, with @best, @final or @VERSION behind it
    #[arg(value_name = "MODEL")]
    model: String,
    /// As ONNX, the format there is
    #[arg(long, required = true)]
    onnx: bool,
    /// Where it goes
    #[arg(long, value_name = "FILE.onnx")]
    save: PathBuf,
    /// What kind of model the file is, where nothing beside or in it says so
    #[arg(long = "model", value_name = "KIND")]
    kind: Option<String>,
}

pub(crate) fn export(flags: &ExportFlags, tasks: &[Arc<dyn Task>]) -> Result<ExitCode, Failure> {
    let found = runtime(1)?.block_on(FoundModel::open(&flags.model))?;
    let (task, job) = found.task(tasks, flags.kind.as_deref())?;
    let (_, frame) = found.load(&*task, &job)?;
    let model = task.onnx(&job, &frame, &found.assets)?;
    let bytes = model.to_bytes();
    model_file::save(&flags.save, &bytes)?;
    let ports = |ports: Vec<skep_learn::onnx::Port>| {
        let port =
            |port: skep_learn::onnx::Port| format!("{} [{}]", port.name, port.shape.join(", "));
        ports.into_iter().map(port).collect::<Vec<_>>().join(", ")
    };
    println!(
        "{} to {}: {} bytes, {} in, {} out",
        task.name(),
        flags.save.display(),
        thousands(bytes.len() as u64),
        ports(model.inputs()),
        ports(model.outputs())
    );
    Ok(ExitCode::SUCCESS)
}
