//! Real processes in temporary folders, for black-box tests: started, watched, killed by id, and
//! gone with the test, whether it passes or panics.

// Each test binary uses its own part of this.
#![allow(dead_code)]

pub(crate) mod browser;
pub(crate) mod home;
pub(crate) mod server;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use skep_wire::{RunView, Version};
use skep_worker::{Client, ClientError, ClientSettings};

/// How long anything may take before a test gives up. The machine may be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// The `skep` binary.
pub(crate) fn skep() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_skep"))
}

/// The example `unit_task`, which has the same command line.
pub(crate) fn unit_task() -> PathBuf {
    let path = skep().with_file_name("examples").join("unit_task");
    assert!(
        path.exists(),
        "{} is missing: `cargo test -p skep` builds it, and so does \
         `cargo build -p skep --example unit_task`",
        path.display()
    );
    path
}

/// Numbers for choosing whom to kill and when; not for anything that must be unpredictable.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seed = now.as_nanos() as u64 ^ u64::from(std::process::id());
        println!("dice: {seed}");
        Self(seed)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (number ^ (number >> 31)) % end
    }
}

/// A port that is free now. It lies below the range from which the system gives out ports of its
/// own: a worker that tries to reach a hive that is down would otherwise, rarely, get that very
/// port, reach itself and keep the hive from coming back.
pub(crate) fn free_port() -> u16 {
    let mut dice = Dice::new();
    loop {
        let port = 10_000 + dice.below(20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Asks until the answer is there.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "gave up waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process whose stderr is kept.
pub(crate) struct Process {
    child: Child,
    stderr: Arc<Mutex<Vec<String>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let lines = Arc::new(Mutex::new(Vec::new()));
        let pipe = child.stderr.take().expect("stderr is piped");
        let theirs = lines.clone();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                theirs.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
        Self { child, stderr: lines, reader: Some(reader) }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("it is our child").is_none()
    }

    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    /// Waits for the end; gives the exit code.
    #[track_caller]
    pub(crate) fn code(&mut self) -> Option<i32> {
        wait_for("a process to end", || self.ended()).code()
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: a plain system call on the id of a child that was not waited for yet.
        unsafe { libc::kill(self.id().cast_signed(), signal) };
    }

    /// SIGKILL, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// What it wrote to stderr so far.
    pub(crate) fn stderr(&self) -> String {
        self.stderr.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }

    /// Everything it wrote to stderr; only for one that has ended and left no children.
    pub(crate) fn last_words(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        self.stderr()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// How to start a hive, again and again, on the same store and port.
pub(crate) struct HiveSetup {
    pub(crate) program: PathBuf,
    pub(crate) store: PathBuf,
    pub(crate) port: u16,
    pub(crate) arguments: Vec<String>,
    /// Makes the command of a worker where that is another program.
    pub(crate) other_worker: Option<Box<dyn Fn() -> Command>>,
}

impl HiveSetup {
    /// A hive of a program on a store; `arguments` is one text with spaces in between.
    pub(crate) fn new(program: &Path, store: &Path, arguments: &str) -> Self {
        Self {
            program: program.to_owned(),
            store: store.to_owned(),
            port: free_port(),
            arguments: arguments.split_whitespace().map(str::to_owned).collect(),
            other_worker: None,
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("hive").args(&self.arguments);
        command.arg("--listen").arg(format!("127.0.0.1:{}", self.port));
        command.arg("--store").arg(&self.store);
        command
    }

    /// Starts it without waiting for anything.
    pub(crate) fn launch(&self) -> Process {
        Process::start(&mut self.command())
    }

    /// Starts it and waits until it says where it is.
    #[track_caller]
    pub(crate) fn start(&self) -> Process {
        let mut process = self.launch();
        let announced = wait_for("the hive to announce itself", || {
            if process.stderr().contains(&format!("hive at {}", self.url())) {
                return Some(true);
            }
            process.ended().map(|_| false)
        });
        assert!(announced, "the hive did not start: {}", process.last_words());
        process
    }

    /// A worker: of the same program, unless the setup has another one.
    pub(crate) fn worker(&self, environment: &[(&str, &str)]) -> Process {
        let mut command = match &self.other_worker {
            Some(other) => other(),
            None => {
                let mut command = Command::new(&self.program);
                command.args(["worker", "--hive", &self.url()]);
                command
            }
        };
        Process::start(command.envs(environment.iter().copied()))
    }

    pub(crate) fn watch(&self) -> Watch {
        Watch::new(&self.url())
    }
}

/// Looks at a hive from outside.
pub(crate) struct Watch {
    runtime: tokio::runtime::Runtime,
    pub(crate) client: Client,
}

impl Watch {
    pub(crate) fn new(url: &str) -> Self {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("starts");
        let settings = ClientSettings {
            url: url.to_owned(),
            patience: Duration::from_secs(30),
            ..ClientSettings::default()
        };
        Self { runtime, client: Client::new(settings).expect("a good address") }
    }

    pub(crate) fn ask<T>(
        &self,
        question: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        self.runtime.block_on(question)
    }

    #[track_caller]
    pub(crate) fn run(&self, name: &str) -> RunView {
        self.ask(self.client.run(name)).expect("the hive answers")
    }

    /// Waits until the run is as wanted.
    #[track_caller]
    pub(crate) fn until(
        &self,
        name: &str,
        what: &str,
        wanted: impl Fn(&RunView) -> bool,
    ) -> RunView {
        wait_for(what, || Some(self.run(name)).filter(|view| wanted(view)))
    }

    /// Waits until the run has ended and its model is written.
    #[track_caller]
    pub(crate) fn finished(&self, name: &str) -> RunView {
        self.until(name, "the run to end", |view| view.state.is_final() && view.model.is_some())
    }
}

/// What a process that was run to its end left.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs a program to its end.
pub(crate) fn run_to_end(command: &mut Command) -> Ended {
    let output = command.stdin(Stdio::null()).output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output is UTF-8");
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// The `skep` binary with these arguments, in one text with spaces in between.
pub(crate) fn skep_command(arguments: &str) -> Command {
    let mut command = Command::new(skep());
    command.args(arguments.split_whitespace());
    command
}

/// SIGKILL again and again, spread evenly over a run's progress, so that it is under fire from
/// the first samples to the last however fast it goes.
pub(crate) struct Fire {
    pub(crate) kills: u64,
    /// Every so manieth kill is of the hive.
    pub(crate) hive_every: u64,
    /// Samples of the whole run.
    pub(crate) samples: u64,
    /// For the workers.
    pub(crate) environment: &'static [(&'static str, &'static str)],
}

impl Fire {
    /// Gives the number of times that the hive was killed; all the others hit workers.
    #[track_caller]
    pub(crate) fn rage(
        &self,
        setup: &HiveSetup,
        run: &str,
        hive: &mut Process,
        workers: &mut [Process],
    ) -> u64 {
        let mut dice = Dice::new();
        let watch = setup.watch();
        let mut hive_kills = 0;
        for kill in 0..self.kills {
            let due = self.samples * kill / (self.kills + self.kills / 40 + 1);
            wait_for("progress", || {
                for worker in workers.iter_mut() {
                    if let Some(status) = worker.ended() {
                        panic!(
                            "a worker left a run that is not done: {status}\n{}",
                            worker.stderr()
                        );
                    }
                }
                let view = watch.run(run);
                assert!(!view.state.is_final(), "{:?} {}", view.state, view.reason);
                (view.samples >= due).then_some(())
            });
            // Not always at the same point of the work.
            std::thread::sleep(Duration::from_millis(dice.below(40)));
            if kill % self.hive_every == self.hive_every - 1 {
                hive.kill();
                *hive = setup.start();
                hive_kills += 1;
            } else {
                let victim = dice.below(workers.len() as u64) as usize;
                workers[victim].kill();
                workers[victim] = setup.worker(self.environment);
            }
        }
        hive_kills
    }
}

/// The manifests of a run's complete checkpoints, oldest first.
pub(crate) fn manifests(store: &Path, run: &str) -> Vec<serde_json::Value> {
    let Ok(folders) = std::fs::read_dir(store.join(format!("runs/{run}/checkpoints"))) else {
        return Vec::new();
    };
    let mut paths: Vec<_> =
        folders.flatten().map(|entry| entry.path().join("manifest.json")).collect();
    paths.sort();
    let texts = paths.iter().filter_map(|path| std::fs::read(path).ok());
    texts.map(|text| serde_json::from_slice(&text).expect("a manifest is whole")).collect()
}

/// The version of the newest complete checkpoint.
pub(crate) fn newest_version(store: &Path, run: &str) -> Option<Version> {
    let newest = manifests(store, run).pop()?;
    newest["version"].as_str().expect("a version").parse().ok()
}

/// The numbers of a tensor in a safetensors file.
pub(crate) fn tensor(path: &Path, name: &str) -> Vec<f32> {
    let loaded = skep_data::model_file::load(path).expect("a model file");
    let number = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    loaded[name].bytes.chunks_exact(4).map(number).collect()
}

/// Checks that every coordinate of the unit task's model is exactly `expected`.
#[track_caller]
pub(crate) fn assert_exactly_once(store: &Path, run: &str, expected: f32) {
    let x = tensor(&store.join(format!("runs/{run}/model.safetensors")), "x");
    let wrong: Vec<_> = x.iter().enumerate().filter(|(_, value)| **value != expected).collect();
    let (count, first) = (wrong.len(), &wrong[..wrong.len().min(8)]);
    assert!(wrong.is_empty(), "{count} of {} samples are not {expected}: {first:?}", x.len());
}
