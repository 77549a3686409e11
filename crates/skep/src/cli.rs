//! The command line: flags, and which command they go to.

use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use skep_learn::Task;

use crate::commands::{
    data, demo, hive, key, logs, model, run, serve, status, train, watch, worker,
};
use crate::failure::Failure;
use crate::logging::{self, LogFlags};

/// Train a model on machines that come and go
#[derive(Parser, Debug)]
#[command(name = "skep", version, arg_required_else_help = true, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    log: LogFlags,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Train here and now: a hive and one worker per core start by themselves
    Train(Box<train::TrainFlags>),
    /// Keep the parameters: the server that workers come to
    Hive(Box<hive::HiveFlags>),
    /// Work for a hive until its run is done
    Worker(worker::WorkerFlags),
    /// Create, list, show, pause, resume, finish, stop or delete runs of a hive
    Run(run::RunFlags),
    /// Fetch, look at, split or copy data
    Data(Box<data::DataFlags>),
    /// Average, measure, look into, convert, fetch or export models
    Model(Box<model::ModelFlags>),
    /// Answer questions with a trained model, over HTTP and on a page
    Serve(Box<serve::ServeFlags>),
    /// Show a hive's runs and workers: versions, staleness, throughput, time spent waiting
    Status(status::StatusFlags),
    /// Watch a run until it ends: progress, loss, workers, events
    Watch(watch::WatchFlags),
    /// Show what a run's workers said
    Logs(logs::LogsFlags),
    /// Show what kills do to a run: nothing
    Demo(demo::DemoFlags),
    /// Make, issue and revoke keys
    Key(key::KeyFlags),
}

/// Runs the whole command line with these tasks, and gives the exit code: 0 done, 1 failure, 2 the
/// user's mistake, 143 called off with work left.
pub fn main(tasks: Vec<Arc<dyn Task>>) -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no mistakes.
            let code = if error.use_stderr() { 2 } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    match start(cli, tasks) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::from(failure.code)
        }
    }
}

fn start(cli: Cli, tasks: Vec<Arc<dyn Task>>) -> Result<ExitCode, Failure> {
    let usual = match &cli.command {
        Command::Hive(_) | Command::Worker(_) | Command::Serve(_) => "info",
        _ => "error",
    };
    logging::start(&cli.log, usual)?;
    if !matches!(
        cli.command,
        Command::Hive(_)
            | Command::Worker(_)
            | Command::Train(_)
            | Command::Serve(_)
            | Command::Demo(_)
    ) {
        // A command that only prints ends quietly when nobody reads on, as with `| head`.
        // SAFETY: the default action of a signal needs no handler to be sound.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    }
    match cli.command {
        Command::Train(flags) => train::train(*flags, &tasks),
        Command::Hive(flags) => hive::hive(*flags, &tasks, cli.log.log_format),
        Command::Worker(flags) => worker::worker(flags, tasks),
        Command::Run(flags) => run::run(flags, &tasks),
        Command::Data(flags) => data::data(*flags, &tasks),
        Command::Model(flags) => model::model(*flags, &tasks),
        Command::Serve(flags) => serve::serve(*flags, &tasks),
        Command::Status(flags) => status::status(&flags),
        Command::Watch(flags) => watch::watch(&flags),
        Command::Logs(flags) => logs::logs(&flags),
        Command::Demo(flags) => demo::demo(flags, &tasks),
        Command::Key(flags) => key::key(flags),
    }
}

/// The async executor of commands that serve or ask.
pub(crate) fn runtime(threads: usize) -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .map_err(|error| Failure::fault(format!("starting threads: {error}")))
}
