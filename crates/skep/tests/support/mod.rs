//! Real processes in temporary folders, for black-box tests: started, watched, killed by id, and
//! gone with the test, whether it passes or panics.

// Each test binary uses its own part of this.
#![allow(dead_code)]

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use skep_wire::RunView;
use skep_worker::{Client, ClientError, ClientSettings};

/// How long anything may take before a test gives up. The machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// The `skep` binary.
pub fn skep() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_skep"))
}

/// The example `unit_task`, which has the same command line.
pub fn unit_task() -> PathBuf {
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
pub struct Dice(u64);

impl Dice {
    pub fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seed = now.as_nanos() as u64 ^ u64::from(std::process::id());
        println!("dice: {seed}");
        Self(seed)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
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
pub fn free_port() -> u16 {
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
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
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
pub struct Process {
    child: Child,
    stderr: Arc<Mutex<Vec<String>>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Process {
    pub fn start(command: &mut Command) -> Self {
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

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("it is our child").is_none()
    }

    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    /// Waits for the end; gives the exit code.
    #[track_caller]
    pub fn code(&mut self) -> Option<i32> {
        wait_for("a process to end", || self.ended()).code()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: a plain system call on the id of a child that was not waited for yet.
        unsafe { libc::kill(self.id().cast_signed(), signal) };
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// What it wrote to stderr so far.
    pub fn stderr(&self) -> String {
        self.stderr.lock().unwrap_or_else(PoisonError::into_inner).join("\n")
    }

    /// Everything it wrote to stderr; only for one that has ended and left no children.
    pub fn last_words(&mut self) -> String {
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
pub struct HiveSetup {
    pub program: PathBuf,
    pub store: PathBuf,
    pub port: u16,
    pub arguments: Vec<String>,
}

impl HiveSetup {
    /// A hive of a program on a store; `arguments` is one text with spaces in between.
    pub fn new(program: &Path, store: &Path, arguments: &str) -> Self {
        Self {
            program: program.to_owned(),
            store: store.to_owned(),
            port: free_port(),
            arguments: arguments.split_whitespace().map(str::to_owned).collect(),
        }
    }

    pub fn url(&self) -> String {
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
    pub fn launch(&self) -> Process {
        Process::start(&mut self.command())
    }

    /// Starts it and waits until it says where it is.
    #[track_caller]
    pub fn start(&self) -> Process {
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

    /// A worker of the same program.
    pub fn worker(&self, environment: &[(&str, &str)]) -> Process {
        let mut command = Command::new(&self.program);
        command.args(["worker", "--hive", &self.url()]).envs(environment.iter().copied());
        Process::start(&mut command)
    }

    pub fn watch(&self) -> Watch {
        Watch::new(&self.url())
    }
}

/// Looks at a hive from outside.
pub struct Watch {
    runtime: tokio::runtime::Runtime,
    pub client: Client,
}

impl Watch {
    pub fn new(url: &str) -> Self {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("starts");
        let settings = ClientSettings {
            url: url.to_owned(),
            patience: Duration::from_secs(30),
            ..ClientSettings::default()
        };
        Self { runtime, client: Client::new(settings).expect("a good address") }
    }

    pub fn ask<T>(
        &self,
        question: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        self.runtime.block_on(question)
    }

    #[track_caller]
    pub fn run(&self, name: &str) -> RunView {
        self.ask(self.client.run(name)).expect("the hive answers")
    }

    /// Waits until the run is as wanted.
    #[track_caller]
    pub fn until(&self, name: &str, what: &str, wanted: impl Fn(&RunView) -> bool) -> RunView {
        wait_for(what, || Some(self.run(name)).filter(|view| wanted(view)))
    }

    /// Waits until the run has ended and its model is written.
    #[track_caller]
    pub fn finished(&self, name: &str) -> RunView {
        self.until(name, "the run to end", |view| view.state.is_final() && view.model.is_some())
    }
}

/// The numbers of a tensor in a safetensors file.
pub fn tensor(path: &Path, name: &str) -> Vec<f32> {
    let loaded = skep_data::model_file::load(path).expect("a model file");
    loaded[name].bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Checks that every coordinate of the unit task's model is exactly `expected`.
#[track_caller]
pub fn assert_exactly_once(store: &Path, run: &str, expected: f32) {
    let x = tensor(&store.join(format!("runs/{run}/model.safetensors")), "x");
    let wrong: Vec<_> = x.iter().enumerate().filter(|(_, value)| **value != expected).collect();
    let (count, first) = (wrong.len(), &wrong[..wrong.len().min(8)]);
    assert!(wrong.is_empty(), "{count} of {} samples are not {expected}: {first:?}", x.len());
}
