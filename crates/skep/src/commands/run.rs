//! `skep run`: creates and changes the runs of a hive.

use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand};
use skep_learn::Task;
use skep_wire::{RunAction, RunView};

use crate::cli::runtime;
use crate::connect::ConnectFlags;
use crate::failure::Failure;
use crate::job_file::{self, JobFlags};
use crate::prepare::{free_name, prepare};
use crate::progress::thousands;

/// What to do with which run.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunFlags {
    #[command(flatten)]
    connect: ConnectFlags,
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Clone, Debug)]
enum Action {
    /// Create a run from a task or a job file; the data is sent to the hive
    Create {
        /// A task or a job file
        job: String,
        #[command(flatten)]
        flags: Box<JobFlags>,
    },
    /// List the runs
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Show one run as JSON: state, settings, tensors, data
    Show { run: String },
    /// Hand out no more work until resumed
    Pause { run: String },
    /// Hand out work again
    Resume { run: String },
    /// Train no more: measure the version there is, and be done
    Finish { run: String },
    /// End now, keeping what there is
    Stop { run: String },
    /// Delete a run with its checkpoints
    Delete { run: String },
}

pub(crate) fn run(flags: RunFlags, tasks: &[Arc<dyn Task>]) -> Result<ExitCode, Failure> {
    let client = flags.connect.client()?;
    let change = |run: String, action| {
        let client = &client;
        async move {
            let view = client.change_run(&run, action).await?;
            println!("{}: {}", view.name, state(&view));
            Ok::<_, Failure>(())
        }
    };
    runtime(1)?.block_on(async {
        match flags.action {
            Action::Create { job, flags } => {
                let task_job = job_file::read(&job, &flags, tasks)?;
                let name = match &task_job.job.run.name {
                    Some(name) => name.clone(),
                    None => {
                        let taken: Vec<_> =
                            client.runs().await?.into_iter().map(|run| run.name).collect();
                        free_name(&task_job.usual_name, &taken)
                    }
                };
                let prepared = prepare(&task_job, name)?;
                for (shard, bytes) in &prepared.data.shards {
                    client.put_shard(&shard.hash, bytes.clone()).await?;
                }
                let view = client.create_run(prepared.file()?).await?;
                println!("{}", view.name);
            }
            Action::List { json } => {
                let runs = client.runs().await?;
                if json {
                    println!("{}", serde_json::to_string(&runs).unwrap_or_default());
                } else {
                    super::status::print_runs(&runs);
                }
            }
            Action::Show { run } => {
                let view = client.run(&run).await?;
                println!("{}", serde_json::to_string_pretty(&view).unwrap_or_default());
            }
            Action::Pause { run } => change(run, RunAction::Pause).await?,
            Action::Resume { run } => change(run, RunAction::Resume).await?,
            Action::Finish { run } => change(run, RunAction::Finish).await?,
            Action::Stop { run } => change(run, RunAction::Stop).await?,
            Action::Delete { run } => {
                client.delete_run(&run).await?;
                println!("{run}: deleted");
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn state(view: &RunView) -> String {
    let reason = if view.reason.is_empty() { String::new() } else { format!(" ({})", view.reason) };
    let state = super::status::state_name(view.state);
    format!("{state}{reason}, version {}, {} samples", view.version, thousands(view.samples))
}
