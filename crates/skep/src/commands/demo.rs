//! `skep demo chaos`: a minute of training under kill -9, and the proof that it did no harm.
//!
//! The same job is trained twice from one seed, first in peace, then under fire: workers and the
//! hive are killed several times a second while a page goes on answering. With `sync` the same
//! seed gives the same bits, so whatever a kill had lost or doubled would show.

mod cast;
mod fire;
mod picture;
mod plot;
mod probe;
mod proof;
mod screen;
mod sight;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use skep_deploy::local::Running;
use skep_learn::Task;
use skep_wire::{RunAction, RunState, RunView};
use skep_worker::{Client, ClientSettings};

use crate::cli::runtime;
use crate::failure::Failure;
use crate::job_file::{self, JobFlags, TaskJob};
use crate::prepare::prepare;
use crate::signals;

use cast::Cast;
use fire::Fire;
use probe::Probe;
use proof::{Proof, Timetable};
use screen::{Scene, Screen};
use sight::Sight;

/// The two runs.
const CALM: &str = "calm";
const CHAOS: &str = "chaos";

/// Contributions to a version. Fewer than there are workers, so that a round need not wait for
/// those who are being started again.
const SLOTS: u64 = 4;
/// Versions between two measurements.
const MEASURE_EVERY: u64 = 15;
/// The part of the time that the run in peace gets. Under fire the same work takes longer.
const CALM_SHARE: f64 = 0.3;
/// How often something is looked at.
const TICK: Duration = Duration::from_millis(25);

/// Which demonstration.
#[derive(Args, Clone, Debug)]
pub(crate) struct DemoFlags {
    #[command(subcommand)]
    demo: Demo,
}

#[derive(Subcommand, Clone, Debug)]
enum Demo {
    /// Train digits while workers and the hive are killed several times a second, beside a page that
    /// follows, and show that nothing was lost, doubled or dropped
    Chaos(Box<ChaosFlags>),
}

/// How much chaos.
#[derive(Args, Clone, Debug)]
pub(crate) struct ChaosFlags {
    /// About how long it takes: a third in peace, the rest under fire
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    seconds: f64,
    /// Worker processes
    #[arg(long, value_name = "N", default_value_t = 8)]
    workers: usize,
    /// How often something is killed
    #[arg(long, value_name = "N", default_value_t = 4.0)]
    kills_per_second: f64,
    /// Mebibytes of memory of its own that a worker may take; the kernel refuses more
    #[arg(long, value_name = "MIB", default_value_t = 32)]
    memory: u64,
    /// From which the model, the order of samples and the choice of victims come
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// An empty folder in which to keep the runs; a temporary one where it is left out
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// A folder for a picture of both curves, chaos.svg
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// At the end keep the page and the hive until Ctrl-C
    #[arg(long)]
    stay: bool,
    /// Make the last line of stdout one JSON object with the result
    #[arg(long)]
    json: bool,
}

pub(crate) fn demo(flags: DemoFlags, tasks: &[Arc<dyn Task>]) -> Result<ExitCode, Failure> {
    let Demo::Chaos(flags) = flags.demo;
    check(&flags)?;
    let stop = signals::flag()?;
    runtime(2)?.block_on(async {
        let cast = Cast::new(&flags)?;
        let mut stage = Stage::open(&flags, &cast, tasks, stop)?;
        let ended = stage.play().await;
        stage.close().await;
        ended
    })
}

fn check(flags: &ChaosFlags) -> Result<(), Failure> {
    if !(flags.seconds >= 4.0 && flags.seconds <= 86_400.0) {
        return Err(Failure::mistake(format!(
            "--seconds {} is not from 4 to 86400",
            flags.seconds
        )));
    }
    if !(2..=256).contains(&flags.workers) {
        return Err(Failure::mistake(format!("--workers {} is not from 2 to 256", flags.workers)));
    }
    if !(flags.kills_per_second > 0.0 && flags.kills_per_second <= 50.0) {
        let given = flags.kills_per_second;
        return Err(Failure::mistake(format!("--kills-per-second {given} is not from 0 to 50")));
    }
    if !(1..=1 << 20).contains(&flags.memory) {
        return Err(Failure::mistake(format!(
            "--memory {} is not from 1 to 1048576",
            flags.memory
        )));
    }
    Ok(())
}

/// Everything that runs, from the first process to the last.
struct Stage<'demo> {
    flags: &'demo ChaosFlags,
    cast: &'demo Cast,
    task_job: TaskJob,
    stop: Arc<AtomicBool>,
    client: Client,
    screen: Screen,
    hive: Option<Running>,
    workers: Option<Running>,
    page: Option<Running>,
    began: Instant,
}

impl<'demo> Stage<'demo> {
    fn open(
        flags: &'demo ChaosFlags,
        cast: &'demo Cast,
        tasks: &[Arc<dyn Task>],
        stop: Arc<AtomicBool>,
    ) -> Result<Self, Failure> {
        let task_job = job(flags.seed, tasks)?;
        let client = Client::new(ClientSettings {
            url: cast.hive_url(),
            patience: Duration::from_secs(60),
            stop: stop.clone(),
            ..ClientSettings::default()
        })?;
        let hive = Some(cast.hive()?);
        let (screen, began) = (Screen::new(), Instant::now());
        let (workers, page) = (None, None);
        Ok(Self { flags, cast, task_job, stop, client, screen, hive, workers, page, began })
    }

    async fn play(&mut self) -> Result<ExitCode, Failure> {
        match self.both().await {
            Err(_) if self.stop.load(Ordering::Relaxed) => {
                eprintln!("interrupted; every process is ended");
                Ok(ExitCode::from(130))
            }
            other => other,
        }
    }

    async fn both(&mut self) -> Result<ExitCode, Failure> {
        let mut scene = Scene::new(self.flags, self.cast);
        let calm = self.calm(&mut scene).await?;
        scene.versions = Some(calm.version.number);
        scene.calm_seconds = self.began.elapsed().as_secs_f64();
        let (chaos, probe) = self.chaos(&calm, &mut scene).await?;
        self.screen.end();
        let result = Proof {
            scene: &scene,
            calm: &calm,
            chaos: &chaos,
            probe: &probe.stop().await,
            seconds: self.began.elapsed().as_secs_f64(),
        }
        .examine(&self.cast.store())
        .await?;
        let picture = match &self.flags.save {
            Some(folder) => Some(picture::save(folder, &scene, &result)?),
            None => None,
        };
        result.report(self.flags.json, picture.as_deref());
        if self.flags.stay {
            let (page, hive) = (self.cast.page_url(), self.cast.hive_url());
            eprintln!("the page is at {page}, both curves at {hive}; Ctrl-C ends it");
            signals::raised(&self.stop).await;
        }
        result.verdict()
    }

    /// The run that nobody disturbs. It ends when its time is up, wherever it is then.
    async fn calm(&mut self, scene: &mut Scene) -> Result<RunView, Failure> {
        let view = self.create(CALM, 0).await?;
        scene.timetable = Some(Timetable::new(&view, SLOTS)?);
        self.workers = Some(self.cast.workers(CALM)?);
        let sight = Sight::new(&self.cast.hive_url(), CALM)?;
        let started = Instant::now();
        let time = Duration::from_secs_f64(self.flags.seconds * CALM_SHARE);
        loop {
            self.look_after()?;
            let seen = sight.now();
            scene.see_calm(&seen, started.elapsed().as_secs_f64() / time.as_secs_f64());
            self.screen.show(scene, self.workers.as_ref());
            // A machine that is busy with other things may not have made anything yet.
            if started.elapsed() >= time && seen.version() >= 2 * MEASURE_EVERY {
                break;
            }
            self.pause().await?;
        }
        self.client.change_run(CALM, RunAction::Finish).await?;
        let view = loop {
            self.look_after()?;
            scene.see_calm(&sight.now(), 1.0);
            self.screen.show(scene, self.workers.as_ref());
            let view = self.client.run(CALM).await?;
            if let Some(view) = ended(view)? {
                break view;
            }
            self.pause().await?;
        };
        scene.calm = self.client.history(CALM, 1).await?.measured;
        self.release_workers().await;
        Ok(view)
    }

    /// The same run under fire, up to the same version.
    async fn chaos(
        &mut self,
        calm: &RunView,
        scene: &mut Scene,
    ) -> Result<(RunView, Probe), Failure> {
        self.create(CHAOS, calm.version.number).await?;
        self.page = Some(self.cast.page()?);
        let test = self.task_job.task.dataset(&self.task_job.job)?.test;
        let probe = Probe::start(self.cast.page_port, CHAOS, &test, &self.stop).await?;
        self.workers = Some(self.cast.workers(CHAOS)?);
        let sight = Sight::new(&self.cast.hive_url(), CHAOS)?;
        let mut fire = Fire::new(self.flags.seed, self.flags.kills_per_second);
        let mut over = false;
        let view = loop {
            let seen = sight.now();
            if let (false, Some(hive), Some(workers)) = (over, &mut self.hive, &mut self.workers) {
                let at = scene.began.elapsed().as_secs_f64();
                if let Some(kill) = fire.burn(&seen, at, hive, workers).await? {
                    scene.kills.push(kill);
                }
            }
            self.look_after()?;
            scene.see_chaos(&seen, &probe);
            self.screen.show(scene, self.workers.as_ref());
            over = over || seen.is_over();
            if over && let Some(view) = ended(self.client.run(CHAOS).await?)? {
                break view;
            }
            self.pause().await?;
        };
        scene.chaos = self.client.history(CHAOS, 1).await?.measured;
        self.release_workers().await;
        // The page has the last word: the version it answers with at the end is the run's.
        let last = view.version.number;
        let patience = Instant::now() + Duration::from_secs(30);
        while probe.latest().is_none_or(|version| version.number != last) {
            if Instant::now() > patience {
                return Err(Failure::fault(format!("the page did not come to version {last}")));
            }
            self.pause().await?;
        }
        scene.see_chaos(&sight.now(), &probe);
        self.screen.show(scene, None);
        Ok((view, probe))
    }

    async fn create(&self, name: &str, steps: u64) -> Result<RunView, Failure> {
        let TaskJob { task, job, usual_name } = &self.task_job;
        let mut job = job.clone();
        job.run.steps = Some(steps);
        job.run.name = Some(name.to_owned());
        let task_job = TaskJob { task: task.clone(), job, usual_name: usual_name.clone() };
        let prepared = prepare(&task_job, name.to_owned())?;
        for (shard, bytes) in &prepared.data.shards {
            self.client.put_shard(&shard.hash, bytes.clone()).await?;
        }
        Ok(self.client.create_run(prepared.file()?).await?)
    }

    /// What ended without being told to is started again, or is a reason to give up.
    fn look_after(&mut self) -> Result<(), Failure> {
        for fleet in [&mut self.hive, &mut self.workers, &mut self.page].into_iter().flatten() {
            fleet.look_after().map_err(|error| self.cast.failure(&error))?;
        }
        Ok(())
    }

    async fn release_workers(&mut self) {
        if let Some(workers) = self.workers.take() {
            workers.stop().await;
        }
    }

    async fn pause(&self) -> Result<(), Failure> {
        tokio::time::sleep(TICK).await;
        if self.stop.load(Ordering::Relaxed) {
            return Err(Failure::fault("interrupted"));
        }
        Ok(())
    }

    /// Ends every process, the hive last.
    async fn close(mut self) {
        self.screen.end();
        let fleets = [self.page.take(), self.workers.take(), self.hive.take()];
        for fleet in fleets.into_iter().flatten() {
            fleet.stop().await;
        }
    }
}

/// A job whose curve takes a while to rise: plain sgd at a constant, low rate.
fn job(seed: u64, tasks: &[Arc<dyn Task>]) -> Result<TaskJob, Failure> {
    let settings = [
        "optimiser.momentum=0",
        "optimiser.weight_decay=0",
        "checkpoint.seconds=0.25",
        "lease.seconds=1",
    ];
    let flags = JobFlags {
        steps: Some(0),
        batch: Some(32),
        every: Some(1),
        rate: Some(0.05),
        seed: Some(seed),
        policy: Some(format!("sync:{SLOTS}")),
        settings: settings
            .map(str::to_owned)
            .into_iter()
            .chain([format!("evaluation.versions={MEASURE_EVERY}")])
            .collect(),
        ..JobFlags::default()
    };
    let mut task_job = job_file::read("mnist", &flags, tasks)?;
    // The two runs are of different length, as far as a schedule knows.
    task_job.job.optimiser.remove("schedule");
    Ok(task_job)
}

/// The run, once it has ended and its model is written.
fn ended(view: RunView) -> Result<Option<RunView>, Failure> {
    match view.state {
        RunState::Done if view.model.is_some() && view.durable.number == view.version.number => {
            Ok(Some(view))
        }
        RunState::Failed | RunState::Stopped => {
            Err(Failure::fault(format!("run {} has ended: {}", view.name, view.reason)))
        }
        _ => Ok(None),
    }
}
