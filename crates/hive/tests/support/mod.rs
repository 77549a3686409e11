//! A real hive on a folder of its own behind a real socket, and clients by hand.
#![allow(dead_code, reason = "each test file uses its own part of this")]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use skep_data::{Store, shard_hash};
use skep_hive::{Access, Deadlines, Hive, HiveError, HiveSettings, Server, TlsIdentity};
use skep_wire::{
    ContributionKind, Dtype, Encoding, Envelope, ErrorBody, ErrorCode, Frame, Layout, LeaseAnswer,
    LeaseView, Manifest, Receipt, Role, RunSpec, RunState, RunView, Schema, ShardRef, TensorSpec,
    Version,
};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The admin key of hives that have keys.
pub(crate) const ADMIN: &str = "skep_admin_of_the_tests_0123456789";

/// The longest that anything here may take. Reached only when something is broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// How a hive of a test is set up.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) byte_budget: usize,
    pub(crate) deadlines: Deadlines,
    pub(crate) keys: bool,
    pub(crate) tls: bool,
}

impl Default for Settings {
    fn default() -> Self {
        let drain = Duration::from_millis(100);
        let deadlines = Deadlines { drain, ..Deadlines::default() };
        Self { byte_budget: 64 << 20, deadlines, keys: false, tls: false }
    }
}

/// A hive that serves.
pub(crate) struct TestHive {
    pub(crate) hive: Arc<Hive>,
    pub(crate) address: SocketAddr,
    pub(crate) folder: TempDir,
    pub(crate) fingerprint: Option<String>,
    settings: Settings,
    down: watch::Sender<bool>,
    server: JoinHandle<Result<(), HiveError>>,
}

impl TestHive {
    pub(crate) async fn start(settings: Settings) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self::start_in(folder, settings).await
    }

    pub(crate) async fn open() -> Self {
        Self::start(Settings::default()).await
    }

    async fn start_in(folder: TempDir, settings: Settings) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a socket");
        let address = listener.local_addr().expect("an address");
        let store = folder.path().join("store").display().to_string();
        let store = Store::open(&store).expect("a store");
        let access = if settings.keys {
            Access::with_keys(&store, ADMIN).await.expect("keys")
        } else {
            Access::open()
        };
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let tls = settings
            .tls
            .then(|| TlsIdentity::auto(&folder.path().join("tls"), &names).expect("a certificate"));
        let fingerprint = tls.as_ref().map(TlsIdentity::fingerprint);
        let Settings { byte_budget, deadlines, .. } = settings;
        let hive = Hive::open(HiveSettings { store, access, byte_budget, deadlines });
        let hive = hive.await.expect("a hive");
        let (down, shutdown) = watch::channel(false);
        let server = Server { listener, tls, deadlines };
        let server = tokio::spawn(skep_hive::serve(server, skep_hive::app(hive.clone()), shutdown));
        Self { hive, address, folder, fingerprint, settings, down, server }
    }

    /// Ends as on SIGTERM, and starts again on the same store.
    pub(crate) async fn restart(self) -> Self {
        self.hive.close().await;
        self.down.send_replace(true);
        self.server.await.expect("no panic").expect("a good end");
        Self::start_in(self.folder, self.settings).await
    }

    pub(crate) fn call(&self, method: Method, path: &str) -> Call {
        Call {
            address: self.address,
            method,
            path: path.to_owned(),
            headers: HeaderMap::new(),
            body: Bytes::new(),
        }
    }

    pub(crate) fn get(&self, path: &str) -> Call {
        self.call(Method::GET, path)
    }

    pub(crate) fn post(&self, path: &str) -> Call {
        self.call(Method::POST, path)
    }

    /// Sends bytes as they are, and gives the connection.
    pub(crate) async fn raw(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.expect("connects");
        stream.write_all(bytes).await.expect("is written");
        stream
    }

    pub(crate) async fn create(&self, run: &RunSetup) {
        self.create_from(run, |_| ()).await;
    }

    /// Creates a run whose version 0 is not all zeros.
    pub(crate) async fn create_from(&self, run: &RunSetup, fill: impl FnOnce(&mut Frame)) {
        let (spec, mut version0) = run.build();
        fill(&mut version0);
        for shards in [&run.train, &run.validation, &run.test] {
            for &samples in shards {
                let bytes = shard(samples);
                self.hive.put_shard(&shard_hash(&bytes), bytes).await.expect("is kept");
            }
        }
        self.hive.create(spec, version0.as_bytes()).await.expect("is created");
    }

    pub(crate) async fn view(&self, run: &str) -> RunView {
        self.get(&format!("/v1/runs/{run}")).ok().await.json()
    }

    pub(crate) async fn state(&self, run: &str) -> RunState {
        self.view(run).await.state
    }

    pub(crate) async fn ask(&self, run: &str, request: Value) -> LeaseAnswer {
        self.post(&format!("/v1/runs/{run}/leases")).json(&request).ok().await.json()
    }

    /// Takes a lease, which must be there to be had.
    pub(crate) async fn lease(&self, run: &str, worker: &str) -> LeaseView {
        match self.ask(run, json!({ "worker": worker, "wait": 20.0 })).await {
            LeaseAnswer::Lease(lease) => lease,
            other => panic!("no lease: {other:?}"),
        }
    }

    pub(crate) fn push(&self, run: &str, envelope: &Envelope, body: impl Into<Bytes>) -> Call {
        let mut call = self.post(&format!("/v1/runs/{run}/contributions")).body(body);
        envelope.write(&mut call.headers);
        call
    }

    /// The newest parameters.
    pub(crate) async fn parameters(&self, run: &RunSetup) -> (Version, Frame) {
        let answer = self.get(&format!("/v1/runs/{}/parameters", run.name)).ok().await;
        let layout = Layout::of_version(&run.schema(), Encoding::F32).expect("a layout");
        (answer.version(), Frame::read(&Arc::new(layout), &answer.body).expect("a frame"))
    }

    /// Does a whole lease with one gradient for every contribution.
    pub(crate) async fn work(&self, run: &RunSetup, lease: &LeaseView, gradient: &Frame) {
        let mut first = lease.first;
        let mut sequence = 0;
        while first < lease.first + lease.count {
            let mut envelope = envelope(lease);
            envelope.count = lease.chunk.min(lease.first + lease.count - first);
            (envelope.first, envelope.sequence) = (first, sequence);
            let body = gradient.as_bytes().to_vec();
            let receipt = self.push(&run.name, &envelope, body).ok().await.receipt();
            assert_eq!(receipt.version.generation, self.hive.generation());
            first += envelope.count;
            sequence += 1;
        }
    }
}

/// The envelope of a lease's first contribution.
pub(crate) fn envelope(lease: &LeaseView) -> Envelope {
    Envelope {
        lease: lease.id,
        sequence: 0,
        first: lease.first,
        count: lease.chunk.min(lease.count),
        base: lease.base,
        kind: ContributionKind::Gradient,
        encoding: Encoding::F32,
        loss: Some(0.5),
        want: None,
        have: None,
        without: None,
    }
}

/// A run of a test. The hive never looks into shards, so they are only bytes.
#[derive(Clone)]
pub(crate) struct RunSetup {
    pub(crate) name: String,
    pub(crate) tensors: Vec<TensorSpec>,
    pub(crate) job: Value,
    pub(crate) train: Vec<u64>,
    pub(crate) validation: Vec<u64>,
    pub(crate) test: Vec<u64>,
}

impl RunSetup {
    /// One tensor of zeros; each contribution makes a version and moves it by the gradient.
    pub(crate) fn new(name: &str, elements: usize) -> Self {
        Self {
            name: name.to_owned(),
            tensors: vec![tensor("w", Dtype::F32, &[elements], Role::trainable())],
            job: json!({
                "run": { "epochs": 1 },
                "train": { "batch": 4, "every": 1 },
                "policy": { "kind": "async", "damping": 0.0 },
                "optimiser": { "kind": "sgd", "rate": 1.0 },
            }),
            train: vec![40],
            validation: vec![],
            test: vec![],
        }
    }

    pub(crate) fn with(mut self, table: &str, settings: Value) -> Self {
        self.job[table] = settings;
        self
    }

    pub(crate) fn schema(&self) -> Schema {
        Schema::new(self.tensors.clone()).expect("a good schema")
    }

    /// A gradient of which every element has a value.
    pub(crate) fn gradient(&self, value: f32) -> Frame {
        let layout = Layout::of_gradient(&self.schema(), Encoding::F32).expect("a layout");
        let mut frame = Frame::zeros(Arc::new(layout));
        frame.floats_mut().fill(value);
        frame
    }

    pub(crate) fn build(&self) -> (RunSpec, Frame) {
        let schema = self.schema();
        let layout = Layout::of_version(&schema, Encoding::F32).expect("a layout");
        let manifest = Manifest {
            source: "a test".to_owned(),
            train: self.train.iter().map(|&samples| reference(samples)).collect(),
            validation: self.validation.iter().map(|&samples| reference(samples)).collect(),
            test: self.test.iter().map(|&samples| reference(samples)).collect(),
            assets: Vec::new(),
        };
        let spec = RunSpec {
            name: self.name.clone(),
            job: serde_json::from_value(self.job.clone()).expect("a good job"),
            schema,
            manifest,
            made_by: "a test".to_owned(),
        };
        (spec, Frame::zeros(Arc::new(layout)))
    }
}

pub(crate) fn tensor(name: &str, dtype: Dtype, shape: &[usize], role: Role) -> TensorSpec {
    TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec(), role }
}

pub(crate) fn shard(samples: u64) -> Bytes {
    Bytes::from(format!("{samples:width$}", width = samples as usize))
}

fn reference(samples: u64) -> ShardRef {
    let bytes = shard(samples);
    ShardRef::kept(shard_hash(&bytes), samples, bytes.len() as u64)
}

/// A request on a connection of its own.
pub(crate) struct Call {
    address: SocketAddr,
    method: Method,
    path: String,
    pub(crate) headers: HeaderMap,
    body: Bytes,
}

impl Call {
    pub(crate) fn header(mut self, name: &'static str, value: &str) -> Self {
        self.headers.append(name, value.parse().expect("a header's value"));
        self
    }

    pub(crate) fn key(self, key: &str) -> Self {
        self.header("authorization", &format!("Bearer {key}"))
    }

    pub(crate) fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    pub(crate) fn json(self, message: &Value) -> Self {
        self.body(message.to_string()).header("content-type", "application/json")
    }

    /// The answer as far as its head.
    pub(crate) async fn head(self) -> http::Response<Incoming> {
        let stream = TcpStream::connect(self.address).await.expect("connects");
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("speaks HTTP");
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(self.method)
            .uri(self.path)
            .header(header::HOST, self.address.to_string())
            .body(Full::new(self.body))
            .expect("a request");
        request.headers_mut().extend(self.headers);
        let answer = tokio::time::timeout(PATIENCE, sender.send_request(request)).await;
        answer.expect("an answer in time").expect("an answer")
    }

    pub(crate) async fn send(self) -> Answer {
        let (parts, body) = self.head().await.into_parts();
        let body = tokio::time::timeout(PATIENCE, body.collect()).await.expect("in time");
        let body = body.expect("a whole body").to_bytes();
        Answer { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    /// The answer, which must be a success.
    pub(crate) async fn ok(self) -> Answer {
        let what = format!("{} {}", self.method, self.path);
        let answer = self.send().await;
        assert!((200..300).contains(&answer.status), "{what}: {answer:?}");
        answer
    }

    /// The answer, which must be this error.
    pub(crate) async fn refused(self, code: ErrorCode) -> ErrorBody {
        let what = format!("{} {}", self.method, self.path);
        let answer = self.send().await;
        assert!(answer.status >= 400, "{what}: {answer:?}");
        let error = answer.error();
        assert_eq!(error.code, code, "{what}: {error:?}");
        error
    }
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = String::from_utf8_lossy(&self.body[..self.body.len().min(500)]);
        write!(f, "{} {:?} {text}", self.status, self.headers)
    }
}

impl Answer {
    pub(crate) fn json<T: DeserializeOwned>(&self) -> T {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The error, after a check that it has the one shape of errors.
    pub(crate) fn error(&self) -> ErrorBody {
        let shape: Value = self.json();
        let fields: Vec<_> = shape.as_object().expect("an object").keys().collect();
        assert_eq!(fields, ["code", "hint", "message"], "{self:?}");
        let error: ErrorBody = self.json();
        assert_eq!(error.code.status(), self.status, "{self:?}");
        assert!(!error.message.is_empty(), "{self:?}");
        error
    }

    pub(crate) fn text(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .unwrap_or_else(|| panic!("no {name}: {self:?}"))
            .to_str()
            .expect("text")
    }

    pub(crate) fn version(&self) -> Version {
        self.text("skep-version").parse().expect("a version")
    }

    pub(crate) fn receipt(&self) -> Receipt {
        Receipt::read(&self.headers).expect("a receipt")
    }
}

/// Asks again until there is something.
pub(crate) async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(found) = ask().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "{what}: not in {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Reads to the end of a connection, however it ends.
pub(crate) async fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    let reading = async {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(read @ 1..) = stream.read(&mut buffer).await {
            all.extend_from_slice(&buffer[..read]);
        }
    };
    tokio::time::timeout(PATIENCE, reading).await.expect("the connection ends in time");
    all
}

/// The status of an answer that was read as bytes.
pub(crate) fn status_of(answer: &[u8]) -> Option<u16> {
    let text = std::str::from_utf8(answer.get(..12)?).ok()?;
    text.strip_prefix("HTTP/1.1 ")?.parse().ok()
}

/// Every file below a folder.
pub(crate) fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}
