//! Who plays: a hive, workers, a page, each a process of its own on loopback, in a folder that is
//! gone afterwards.

use std::net::TcpListener;
use std::path::PathBuf;

use skep_deploy::local::{Fleet, LocalError, Running};
use tempfile::TempDir;

use super::ChaosFlags;
use crate::failure::Failure;

/// How to start each of them.
pub(super) struct Cast {
    program: PathBuf,
    folder: PathBuf,
    /// Removed with the cast.
    _temporary: Option<TempDir>,
    hive_port: u16,
    pub(super) page_port: u16,
    workers: usize,
    memory: u64,
}

impl Cast {
    pub(super) fn new(flags: &ChaosFlags) -> Result<Self, Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::fault(format!("where this program is: {error}")))?;
        let (folder, temporary) = match &flags.store {
            Some(folder) => (empty(folder)?, None),
            None => {
                let made = tempfile::Builder::new().prefix("skep-demo-").tempdir();
                let made = made.map_err(|error| {
                    Failure::fault(format!("making a temporary folder: {error}"))
                })?;
                (made.path().to_owned(), Some(made))
            }
        };
        let hive_port = free_port(flags.seed)?;
        let page_port = free_port(flags.seed ^ u64::from(hive_port))?;
        Ok(Self {
            program,
            folder,
            _temporary: temporary,
            hive_port,
            page_port,
            workers: flags.workers,
            memory: flags.memory << 20,
        })
    }

    /// Where the hive keeps everything.
    pub(super) fn store(&self) -> PathBuf {
        self.folder.join("store")
    }

    pub(super) fn hive_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.hive_port)
    }

    pub(super) fn page_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.page_port)
    }

    /// The hive: always the same command, so that it goes on where it was.
    pub(super) fn hive(&self) -> Result<Running, Failure> {
        let listen = format!("127.0.0.1:{}", self.hive_port);
        let store = self.store().to_string_lossy().into_owned();
        self.start("hive", 1, None, &["hive", "--listen", &listen, "--store", &store])
    }

    pub(super) fn workers(&self, run: &str) -> Result<Running, Failure> {
        let arguments = ["worker", "--hive", &self.hive_url(), "--run", run];
        self.start("workers", self.workers, Some(self.memory), &arguments)
    }

    pub(super) fn page(&self) -> Result<Running, Failure> {
        let follow = format!("{}/{}", self.hive_url(), super::CHAOS);
        let listen = format!("127.0.0.1:{}", self.page_port);
        self.start("page", 1, None, &["serve", "--follow", &follow, "--listen", &listen])
    }

    fn start(
        &self,
        name: &str,
        count: usize,
        memory: Option<u64>,
        arguments: &[&str],
    ) -> Result<Running, Failure> {
        let arguments = ["--log", "warn"].iter().chain(arguments);
        let fleet = Fleet {
            program: self.program.clone(),
            arguments: arguments.map(|&text| text.to_owned()).collect(),
            environment: Vec::new(),
            count,
            memory,
            log: Some(self.folder.join(format!("{name}.log"))),
        };
        fleet.start().map_err(|error| self.failure(&error))
    }

    /// The folder is about to be removed, so the last words of who failed are said here.
    pub(super) fn failure(&self, error: &LocalError) -> Failure {
        let LocalError::FalseStarts { status, log: Some(log) } = error else {
            return Failure::fault(error.to_string());
        };
        let who = log.file_stem().unwrap_or_default().to_string_lossy();
        let text = std::fs::read_to_string(log).unwrap_or_default();
        let last = text.lines().rfind(|line| !line.contains("backtrace")).unwrap_or("nothing");
        let failure = Failure::fault(format!("{who}: keeps ending ({status}); it says: {last}"));
        if who == "workers" {
            return failure.hint("if memory is what it lacks: a higher --memory");
        }
        failure
    }
}

/// The folder, made if it is not there; never one in which there is something.
fn empty(folder: &PathBuf) -> Result<PathBuf, Failure> {
    let wrong = |error: std::io::Error| Failure::mistake(format!("{}: {error}", folder.display()));
    std::fs::create_dir_all(folder).map_err(wrong)?;
    if std::fs::read_dir(folder).map_err(wrong)?.next().is_some() {
        return Err(Failure::mistake(format!("{} is not empty", folder.display()))
            .hint("give --store a new folder, or leave it out"));
    }
    std::fs::canonicalize(folder).map_err(wrong)
}

/// A port that is free now. It lies below the range from which the system gives out ports of its
/// own: a worker that tries to reach a hive that is down could otherwise get that very port, reach
/// itself and keep the hive from coming back.
fn free_port(seed: u64) -> Result<u16, Failure> {
    let first = u64::from(std::process::id()).wrapping_add(seed);
    for attempt in 0..20_000 {
        let port = 10_000 + (first.wrapping_add(attempt).wrapping_mul(7919) % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    Err(Failure::fault("no port from 10000 to 29999 is free"))
}
