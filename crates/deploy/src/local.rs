//! Workers as processes of this machine, started again when they die: the smallest fleet.

use std::fs::File;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use thiserror::Error;
use tokio::process::{Child, Command};

/// How long a worker may take to give back what it holds.
const GRACE: Duration = Duration::from_secs(5);
/// A worker that ends sooner than this has not worked.
const TOO_SOON: Duration = Duration::from_secs(3);
/// How often in a row a worker may end too soon.
const MOST_FALSE_STARTS: u32 = 5;

/// What to start.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Variables for its environment, such as keys, which must not show in a process list.
    pub environment: Vec<(String, String)>,
    /// How many.
    pub count: usize,
    /// Bytes of memory of its own that a process may take; the kernel refuses more. `None` is no
    /// limit.
    pub memory: Option<u64>,
    /// A file for what they say, added to what is there; where this program's own words go
    /// otherwise.
    pub log: Option<PathBuf>,
}

/// What ends a fleet.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LocalError {
    /// A worker could not be started.
    #[error("cannot start {program}: {source}")]
    Start {
        /// The program.
        program: String,
        /// Why.
        source: std::io::Error,
    },
    /// What they say cannot be kept.
    #[error("{path}: {source}")]
    Log {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// Workers end before they have worked.
    #[error("workers keep ending at once ({status}); their last words are {}", place(log.as_deref()))]
    FalseStarts {
        /// How the last one ended.
        status: ExitStatus,
        /// Where they said why.
        log: Option<PathBuf>,
    },
}

fn place(log: Option<&std::path::Path>) -> String {
    log.map_or("above".to_owned(), |log| format!("in {}", log.display()))
}

/// A fleet that was started.
pub struct Running {
    fleet: Fleet,
    workers: Vec<Worker>,
    false_starts: u32,
    /// How often a worker was started again.
    pub restarts: u64,
}

struct Worker {
    child: Option<Child>,
    started: Instant,
}

impl Fleet {
    /// Starts all workers.
    pub fn start(self) -> Result<Running, LocalError> {
        let workers =
            (0..self.count).map(|_| self.start_one()).collect::<Result<Vec<_>, LocalError>>()?;
        Ok(Running { fleet: self, workers, false_starts: 0, restarts: 0 })
    }

    fn start_one(&self) -> Result<Worker, LocalError> {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        if let Some(path) = &self.log {
            let open = File::options().create(true).append(true).open(path);
            let file = open.map_err(|source| {
                let path = path.display().to_string();
                LocalError::Log { path, source }
            })?;
            command.stderr(file);
        }
        let memory = self.memory;
        // A fleet does not outlive whoever started it, however that ended.
        // SAFETY: `prctl` and `setrlimit` are safe to call between fork and exec.
        unsafe {
            command.pre_exec(move || {
                #[cfg(target_os = "linux")]
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                match memory {
                    Some(bytes) => limit_memory(bytes),
                    None => Ok(()),
                }
            });
        }
        let child = command.spawn().map_err(|source| LocalError::Start {
            program: self.program.display().to_string(),
            source,
        })?;
        Ok(Worker { child: Some(child), started: Instant::now() })
    }
}

/// Private memory that can be written: heap, stacks, anonymous mappings. Unlike the size of the
/// address space it does not count what is only reserved, so it is close to what is used.
fn limit_memory(bytes: u64) -> std::io::Result<()> {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: a plain system call on a value that outlives it.
    match unsafe { libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

impl Running {
    /// The process ids of the workers that live.
    pub fn process_ids(&self) -> Vec<u32> {
        self.workers.iter().filter_map(|worker| worker.child.as_ref()?.id()).collect()
    }

    /// How many there are, alive or not.
    pub fn count(&self) -> usize {
        self.workers.len()
    }

    /// Starts again what died; a worker that ended well is not needed any more.
    pub fn look_after(&mut self) -> Result<(), LocalError> {
        for worker in &mut self.workers {
            let Some(child) = &mut worker.child else { continue };
            let Ok(Some(status)) = child.try_wait() else { continue };
            if status.success() {
                worker.child = None;
                continue;
            }
            self.false_starts =
                if worker.started.elapsed() < TOO_SOON { self.false_starts + 1 } else { 0 };
            if self.false_starts >= MOST_FALSE_STARTS || status.code() == Some(2) {
                return Err(LocalError::FalseStarts { status, log: self.fleet.log.clone() });
            }
            tracing::warn!("a worker ended ({status}); starting another");
            *worker = self.fleet.start_one()?;
            self.restarts += 1;
        }
        Ok(())
    }

    /// Ends one of them with SIGKILL, waits until it is gone, and starts another in its place. Says
    /// whether there was one to end: it may have ended by itself, well or not.
    pub async fn kill(&mut self, at: usize) -> Result<bool, LocalError> {
        let Some(worker) = self.workers.get_mut(at) else { return Ok(false) };
        let Some(child) = &mut worker.child else { return Ok(false) };
        if !matches!(child.try_wait(), Ok(None)) {
            return Ok(false);
        }
        let _ = child.kill().await;
        *worker = self.fleet.start_one()?;
        self.restarts += 1;
        Ok(true)
    }

    /// Asks all workers to give back what they hold and end; ends those that do not.
    pub async fn stop(mut self) {
        for id in self.process_ids() {
            // SAFETY: a plain system call on the id of a child that was not waited for yet.
            unsafe { libc::kill(id.cast_signed(), libc::SIGTERM) };
        }
        let deadline = Instant::now() + GRACE;
        for worker in &mut self.workers {
            if let Some(child) = &mut worker.child {
                let left = deadline.saturating_duration_since(Instant::now());
                if tokio::time::timeout(left, child.wait()).await.is_err() {
                    let _ = child.kill().await;
                }
            }
        }
    }
}
