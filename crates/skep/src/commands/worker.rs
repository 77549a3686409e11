//! `skep worker`: works for a hive until its run is done.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use skep_learn::Task;
use skep_worker::{WorkEnd, WorkerSettings};

use crate::connect::ConnectFlags;
use crate::failure::Failure;
use crate::signals;

/// How to work.
#[derive(Args, Clone, Debug)]
pub(crate) struct WorkerFlags {
    #[command(flatten)]
    connect: ConnectFlags,
    /// The run to work on; any that is running where it is left out
    #[arg(long, value_name = "RUN")]
    run: Option<String>,
    /// The worker's name; made up where it is left out. Two workers must not share one
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Seconds after which the worker must be gone; the hive gives it work that fits
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Mebibytes of data to keep in memory
    #[arg(long, value_name = "MIB", default_value_t = 8)]
    cache: u64,
    /// Seconds to go on trying when the hive does not answer
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    patience: f64,
}

pub(crate) fn worker(flags: WorkerFlags, tasks: Vec<Arc<dyn Task>>) -> Result<ExitCode, Failure> {
    let seconds = |name: &str, value: f64| {
        Duration::try_from_secs_f64(value)
            .map_err(|_| Failure::mistake(format!("--{name} {value} is not a time")))
    };
    let stop = signals::flag()?;
    let until = match flags.seconds {
        Some(value) => Some(Instant::now() + seconds("seconds", value)?),
        None => None,
    };
    let settings = WorkerSettings {
        client: flags.connect.settings(seconds("patience", flags.patience)?, stop)?,
        run: flags.run,
        name: flags.name,
        cache_bytes: flags.cache << 20,
        until,
        tasks,
    };
    match skep_worker::work(settings)? {
        WorkEnd::RunEnded => Ok(ExitCode::SUCCESS),
        WorkEnd::CalledOff => {
            tracing::info!("called off; what was held is given back");
            Ok(ExitCode::from(143))
        }
    }
}
