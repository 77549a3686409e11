//! `skep model pull`: a version of a run as one file that has all that is needed to use it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use skep_data::{ModelFormat, model_file};
use skep_wire::{Encoding, RunSpec};

use super::average::format_of_name;
use crate::cli::runtime;
use crate::connect::ConnectFlags;
use crate::failure::Failure;
use crate::progress::thousands;
use skep_serve::found::{FoundModel, Which, run_files, split};

/// What to fetch, and where to.
#[derive(Args, Clone, Debug)]
pub(crate) struct PullFlags {
    /// RUN@best, RUN@final, RUN@newest or RUN@VERSION, of a hive (--hive, or http://HOST:PORT/RUN@…)
    /// or of a store (STORE/RUN@…); @final where it is left out
    #[arg(value_name = "RUN@VERSION")]
    run: String,
    /// Where it goes, its ending says in which format; RUN-VERSION.safetensors where it is left out
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Say what was fetched as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: ConnectFlags,
}

pub(crate) fn pull(flags: &PullFlags) -> Result<ExitCode, Failure> {
    let (path, which) = split(&flags.run)?;
    let which = which.unwrap_or(Which::Final);
    let found = runtime(1)?.block_on(async {
        if !path.contains("://") && run_files(Path::new(path))?.is_some() {
            let text = if flags.run == path { format!("{path}@final") } else { flags.run.clone() };
            return Ok(FoundModel::open(&text).await?);
        }
        of_hive(path, which, &flags.connect).await
    })?;
    let word = match which {
        Which::Best => "best".to_owned(),
        Which::Final => "final".to_owned(),
        Which::Newest => "newest".to_owned(),
        Which::Version(version) => version.to_string(),
    };
    let run = found.run.clone().unwrap_or_default();
    let save =
        flags.save.clone().unwrap_or_else(|| PathBuf::from(format!("{run}-{word}.safetensors")));
    let format = format_of_name(&save)?;
    let metadata = found.metadata();
    let encoded = model_file::encode(format, &found.tensors, &metadata, None)?;
    model_file::save(&save, &encoded)?;
    let version = found.version.clone();
    if flags.json {
        let samples = found.samples;
        println!(
            "{}",
            json!({ "saved": save, "run": run, "version": version, "samples": samples })
        );
    } else {
        let samples = found.samples.map(|samples| format!(", {} samples", thousands(samples)));
        println!(
            "{run} {word}: version {}{}, {} bytes: {}",
            version.as_deref().unwrap_or("unknown"),
            samples.unwrap_or_default(),
            thousands(encoded.len() as u64),
            save.display()
        );
        if format != ModelFormat::Safetensors && !found.assets.is_empty() {
            eprintln!(
                "note: its vocabulary stays behind; only safetensors files have a place for it"
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A version of a hive's run, with its assets.
async fn of_hive(path: &str, which: Which, connect: &ConnectFlags) -> Result<FoundModel, Failure> {
    let (connect, run) = connect.of_run(path);
    if !RunSpec::is_name(run) {
        return Err(Failure::mistake(format!("there is no run at `{path}`")).hint(
            "a run of a hive has a plain name such as mnist; STORE/RUN has a run.json in it",
        ));
    }
    let client = connect.client()?;
    let view = client.run(run).await?;
    let pulled = match which {
        Which::Best => client.best_parameters(run).await?,
        Which::Newest => client.parameters(run, None, Encoding::F32).await?,
        Which::Version(version) => client.parameters(run, Some(version), Encoding::F32).await?,
        Which::Final => {
            if !view.state.is_final() {
                return Err(Failure::mistake(format!("run `{run}` has not ended"))
                    .hint("@newest is what there is of it now, @best the best so far"));
            }
            client.parameters(run, None, Encoding::F32).await?
        }
    };
    let samples = (pulled.version == view.version).then_some(view.samples);
    Ok(FoundModel {
        name: run.to_owned(),
        run: Some(run.to_owned()),
        version: Some(pulled.version.to_string()),
        samples,
        assets: skep_serve::assets_of_run(&client, run, &view.manifest).await?,
        job: Some(view.job),
        tensors: model_file::parse(run, pulled.bytes())?,
        hash: String::new(),
        folders: Vec::new(),
    })
}
