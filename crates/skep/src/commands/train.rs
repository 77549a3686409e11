//! `skep train`: the whole job on this machine with one command.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use skep_data::{Store, list_runs};
use skep_deploy::local::{Fleet, Running};
use skep_hive::{Access, Deadlines, Hive, HiveSettings, Server};
use skep_learn::Task;
use skep_serve::found::EnsembleFile;
use skep_wire::{RunAction, RunState, RunView};
use skep_worker::{Client, ClientSettings};
use tokio::sync::watch;

use crate::cli::runtime;
use crate::commands::hive::{listen, local_address, submit};
use crate::commands::model::evaluate;
use crate::failure::Failure;
use crate::job_file::{self, JobFlags, TaskJob};
use crate::prepare::{free_name, prepare};
use crate::progress::{Progress, duration, thousands};
use crate::signals;
use crate::store_lock::StoreLock;

/// What to train, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct TrainFlags {
    /// A task (`skep train mnist`) or a job file (`skep train job.toml`)
    #[arg(value_name = "TASK|JOB.toml", required_unless_present = "resume")]
    what: Option<String>,
    /// Go on with a run that was interrupted
    #[arg(long, value_name = "RUN", conflicts_with = "what")]
    resume: Option<String>,
    /// Worker processes to start; one per core where it is left out
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Where everything is kept: a folder or file:// address
    #[arg(long, env = "SKEP_STORE", value_name = "STORE", default_value = "skep-runs")]
    store: String,
    /// Train so many models, each on all the data from a seed and an order of its own, and keep them
    /// all: they answer together
    #[arg(long, value_name = "N", conflicts_with = "resume")]
    ensemble: Option<usize>,
    /// Make the last line of stdout one JSON object with the result
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    job_flags: JobFlags,
}

pub(crate) fn train(flags: TrainFlags, tasks: &[Arc<dyn Task>]) -> Result<ExitCode, Failure> {
    if flags.workers == Some(0) {
        return Err(Failure::mistake("--workers must be 1 or more"));
    }
    let stop = signals::flag()?;
    runtime(2)?.block_on(async move {
        let store = Store::open(&flags.store)?;
        let Some(_lock) = StoreLock::take(&store) else {
            return Err(Failure::mistake(format!("another hive is at work on {}", flags.store))
                .hint("give another --store, or send that hive the job with `skep run create`"));
        };
        // Everything that can be wrong is found before anything is started.
        let taken = list_runs(&store).await?;
        let (names, prepared) = match (&flags.what, &flags.resume) {
            (Some(what), _) => {
                let mut task_job = job_file::read(what, &flags.job_flags, tasks)?;
                let count = flags.workers.or(task_job.job.workers.count);
                fit_to_fleet(&mut task_job, count.unwrap_or_else(cores));
                let names = names(&task_job, flags.ensemble, &taken)?;
                let first = prepare(&task_job, names[0].clone())?;
                let prepared = names
                    .iter()
                    .zip(0..)
                    .map(|(name, at)| first.sibling(&*task_job.task, name, at));
                let prepared = prepared.collect::<Result<Vec<_>, _>>()?;
                (names, prepared)
            }
            (None, Some(name)) if taken.contains(name) => (vec![name.clone()], Vec::new()),
            (None, name) => {
                let name = name.as_deref().unwrap_or_default();
                return Err(Failure::mistake(format!("there is no run `{name}` to resume"))
                    .hint(format!("runs in {}: {}", flags.store, taken.join(", "))));
            }
        };
        let access = Access::open();
        let deadlines = Deadlines::default();
        let hive = Hive::open(HiveSettings {
            store: store.clone(),
            access,
            byte_budget: 1 << 30,
            deadlines,
        })
        .await?;
        for prepared in &prepared {
            submit(&hive, prepared).await?;
        }
        let listener = listen("127.0.0.1:0").await?;
        let url = format!("http://{}", local_address(&listener)?);
        let (down, shutdown) = watch::channel(false);
        let server = Server { listener, tls: None, deadlines };
        let served = tokio::spawn(skep_hive::serve(server, skep_hive::app(hive.clone()), shutdown));
        let client = Client::new(ClientSettings {
            url: url.clone(),
            patience: Duration::from_secs(10),
            ..ClientSettings::default()
        })?;
        let ensemble = match flags.ensemble {
            Some(_) => Some(write_ensemble(&ensemble_path(&store, &names)?, &names)?),
            None => None,
        };
        let mut ended = Vec::new();
        for name in &names {
            ended.push(work_through(&client, name, &url, &flags, &stop).await);
            if !matches!(ended.last(), Some(Ok((view, true))) if view.state != RunState::Failed) {
                break;
            }
        }
        hive.close().await;
        down.send_replace(true);
        let _ = served.await;
        let mut views = Vec::new();
        for (name, ended) in names.iter().zip(ended) {
            let (view, finished) = ended?;
            if !finished {
                let store = match flags.store.as_str() {
                    "skep-runs" => String::new(),
                    store => format!(" --store {store}"),
                };
                eprintln!(
                    "interrupted at version {}; everything is kept\n\
                     go on with: skep train --resume {name}{store}",
                    view.version,
                );
                return Ok(ExitCode::from(130));
            }
            views.push(view);
        }
        match (ensemble, &views[..]) {
            (None, [view, ..]) => report(view, flags.json),
            (Some(ensemble), views) => report_all(&ensemble, views, tasks, flags.json).await,
            (None, []) => Err(Failure::fault("there was nothing to train")),
        }
    })
}

/// What the run is called; the members of an ensemble have numbers.
fn names(
    task_job: &TaskJob,
    ensemble: Option<usize>,
    taken: &[String],
) -> Result<Vec<String>, Failure> {
    let name = match &task_job.job.run.name {
        Some(name) if ensemble.is_none() && taken.contains(name) => {
            return Err(Failure::mistake(format!("there is a run `{name}`"))
                .hint(format!("choose another --name, or --resume {name}")));
        }
        Some(name) => name.clone(),
        None if ensemble.is_some() => task_job.usual_name.clone(),
        None => free_name(&task_job.usual_name, taken),
    };
    let Some(members) = ensemble else { return Ok(vec![name]) };
    if !(2..=MOST_MEMBERS).contains(&members) {
        return Err(Failure::mistake(format!("--ensemble {members} cannot be"))
            .hint(format!("it can have from 2 to {MOST_MEMBERS} members")));
    }
    let of = |name: &str| (1..=members).map(|at| format!("{name}-{at}")).collect::<Vec<_>>();
    let is_free = |names: &Vec<String>| names.iter().all(|name| !taken.contains(name));
    let mut others = (2..).map(|number| of(&format!("{name}-{number}")));
    match Some(of(&name)).filter(is_free) {
        Some(names) => Ok(names),
        None if task_job.job.run.name.is_none() => Ok(others.find(is_free).unwrap_or_default()),
        None => Err(Failure::mistake(format!("there are runs `{name}-…` already"))
            .hint("choose another --name")),
    }
}

/// Starts workers for a run and shows its progress until it has ended or someone interrupts.
async fn work_through(
    client: &Client,
    name: &str,
    url: &str,
    flags: &TrainFlags,
    stop: &AtomicBool,
) -> Result<(RunView, bool), Failure> {
    let view = client.run(name).await?;
    let count = flags.workers.or(view.job.workers.count).unwrap_or_else(cores);
    if count == 0 {
        return Err(Failure::mistake("--workers must be 1 or more"));
    }
    eprintln!("{}", introduction(&view, count, url));
    let mut fleet = fleet(url, name, count)?.start().map_err(fleet_failure)?;
    let ended = follow(client, name, &mut fleet, stop).await;
    fleet.stop().await;
    ended
}

/// More members than this are a slip of the finger.
const MOST_MEMBERS: usize = 100;

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// More slots than the task's own where there are more workers, so that none is idle; up to 8,
/// because larger versions learn less from each sample. The rate grows with the square root of
/// the version's samples, as is usual. Only where the task's own policy and rate stand.
fn fit_to_fleet(task_job: &mut TaskJob, workers: usize) {
    let usual = task_job.task.defaults();
    let job = &mut task_job.job;
    if job.run.exchange == "models" {
        // A slot for each worker; where models are averaged once, a slot is a shard.
        if job.policy.contains_key("rounds") {
            job.data.shards.get_or_insert(if job.data.copies > 1 { 1 } else { workers });
        } else {
            job.policy.entry("slots").or_insert_with(|| json!(workers));
        }
        return;
    }
    let untouched =
        job.policy == usual.policy && job.optimiser.get("rate") == usual.optimiser.get("rate");
    let slots = job.policy.get("slots").and_then(Value::as_u64);
    let rate = job.optimiser.get("rate").and_then(Value::as_f64);
    if let (true, Some(slots), Some(rate)) = (untouched, slots, rate) {
        let wanted = (workers as u64).min(8);
        if wanted > slots {
            job.policy.insert("slots".to_owned(), json!(wanted));
            let factor = (wanted as f64 / slots as f64).sqrt();
            job.optimiser.insert("rate".to_owned(), json!(rate * factor));
        }
    }
}

fn fleet_failure(error: skep_deploy::local::LocalError) -> Failure {
    Failure::fault(error.to_string())
}

/// The workers: this very program, so that tasks of one's own work too.
fn fleet(url: &str, run: &str, count: usize) -> Result<Fleet, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::fault(format!("where this program is: {error}")))?;
    let arguments = ["--log", "error", "worker", "--hive", url, "--run", run, "--patience", "60"];
    Ok(Fleet {
        program,
        arguments: arguments.map(str::to_owned).to_vec(),
        environment: Vec::new(),
        count,
        memory: None,
        log: None,
    })
}

fn introduction(view: &RunView, workers: usize, url: &str) -> String {
    let manifest = &view.manifest;
    let count = |split| thousands(manifest.samples(split));
    format!(
        "run {}: {} on {} ({} training, {} validation, {} test samples)\n\
         {} parameters, {} worker{}; hive at {url}",
        view.name,
        view.job.model.kind,
        manifest.source,
        count(skep_wire::Split::Train),
        count(skep_wire::Split::Validation),
        count(skep_wire::Split::Test),
        thousands(view.schema.trainable_elements() as u64),
        workers,
        if workers == 1 { "" } else { "s" },
    )
}

/// Shows progress until the run has ended and its model is written, or someone interrupts.
async fn follow(
    client: &Client,
    name: &str,
    fleet: &mut Running,
    stop: &AtomicBool,
) -> Result<(RunView, bool), Failure> {
    let mut progress = Progress::new();
    let result = loop {
        let view = match client.run(name).await {
            Ok(view) => view,
            Err(error) => break Err(error.into()),
        };
        progress.show(&view);
        let kept = view.durable.number == view.version.number;
        if view.state.is_final() && view.model.is_some() && kept {
            break Ok((view, true));
        }
        if let Some(trouble) = &view.trouble
            && view.state.is_final()
        {
            break Err(Failure::fault(format!("the result could not be written: {trouble}"))
                .hint(format!("once that is mended: skep train --resume {name}")));
        }
        if stop.load(Ordering::Relaxed) {
            let endless = view.epochs.is_none() && view.steps.is_none();
            if !endless || view.state.is_final() {
                break Ok((view, false));
            }
            // `--steps 0` trains until stopped: this is the stop. A second signal ends at once.
            client.change_run(name, RunAction::Finish).await?;
            stop.store(false, Ordering::Relaxed);
        }
        if let Err(error) = fleet.look_after() {
            break Err(fleet_failure(error));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    progress.end();
    result
}

fn report(view: &RunView, json: bool) -> Result<ExitCode, Failure> {
    if view.state == RunState::Failed {
        return Err(Failure::fault(format!("the run failed: {}", view.reason))
            .hint("where the loss is not finite: a lower --rate, or --set optimiser.clip_norm=1"));
    }
    let accuracy = view.test.and_then(|test| test.accuracy);
    let model = view.model.clone().unwrap_or_default();
    let loss = view.test.map(|test| test.loss).or(view.loss);
    for gap in &view.skipped {
        eprintln!(
            "skipped: positions {} to {} of epoch {}: {}",
            gap.first,
            gap.first + gap.count - 1,
            gap.epoch + 1,
            gap.reason
        );
    }
    if json {
        let result = json!({
            "run": view.name,
            "state": view.state,
            "version": view.version,
            "samples": view.samples,
            "loss": loss,
            "accuracy": accuracy,
            "seconds": view.seconds,
            "model": model,
        });
        println!("{result}");
    } else {
        if let Some(test) = view.test {
            let share = test.accuracy.map_or(String::new(), |a| format!("{:.2} %, ", a * 100.0));
            println!(
                "test accuracy  {share}loss {:.4} on {} samples",
                test.loss,
                thousands(test.samples)
            );
        }
        let rate = view.samples as f64 / view.seconds.max(0.001);
        println!(
            "elapsed time   {} ({} samples, {} samples/s, version {})",
            if view.seconds < 60.0 {
                format!("{:.1} s", view.seconds)
            } else {
                duration(view.seconds)
            },
            thousands(view.samples),
            thousands(rate as u64),
            view.version
        );
        println!("model          {model}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Where an ensemble's file lies: beside the runs, under the name that its members share.
fn ensemble_path(store: &Store, names: &[String]) -> Result<PathBuf, Failure> {
    let usual = names[0].rsplit_once('-').map_or("ensemble", |(name, _)| name);
    store.local_path(&format!("ensembles/{usual}.json")).ok_or_else(|| {
        Failure::mistake("an ensemble needs a store in a folder").hint("give a folder as --store")
    })
}

/// Writes down who belongs to an ensemble.
fn write_ensemble(path: &Path, names: &[String]) -> Result<PathBuf, Failure> {
    let members = names.iter().map(|name| format!("../runs/{name}")).collect();
    let text = serde_json::to_string_pretty(&EnsembleFile { members })
        .map_err(|error| Failure::fault(error.to_string()))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)
        .map_err(|error| Failure::fault(format!("{}: {error}", folder.display())))?;
    skep_data::model_file::save(path, text.as_bytes())?;
    Ok(path.to_owned())
}

/// Measures the members of an ensemble, one by one and together.
async fn report_all(
    ensemble: &Path,
    views: &[RunView],
    tasks: &[Arc<dyn Task>],
    json: bool,
) -> Result<ExitCode, Failure> {
    if let Some(failed) = views.iter().find(|view| view.state == RunState::Failed) {
        return report(failed, json);
    }
    let shown = ensemble.to_string_lossy().into_owned();
    evaluate::measure(std::slice::from_ref(&shown), tasks, json).await?;
    let note = format!("ensemble       {shown}\nask it with    skep serve {shown}");
    if json {
        eprintln!("{note}")
    } else {
        println!("{note}")
    }
    Ok(ExitCode::SUCCESS)
}
