//! A hive for benchmarks, and what a worker process costs: memory, and time to its first gradient.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Map, Value, json};
use skep_data::{Column, Dataset, PrepareSettings, Prepared, RowSplit, Store, Table};
use skep_hive::{Access, Hive, HiveSettings, Server};
use skep_wire::{Dtype, Encoding, Frame, Job, Layout, RunSpec, Schema};
use skep_worker::{Client, ClientSettings};

use crate::Failure;
use crate::rows::{Row, Target, median};

/// A hive in this process, on a port of its own.
pub(crate) struct TestHive {
    runtime: tokio::runtime::Runtime,
    hive: std::sync::Arc<Hive>,
    pub(crate) url: String,
    _folder: tempfile::TempDir,
    _down: tokio::sync::watch::Sender<bool>,
}

impl TestHive {
    pub(crate) fn start() -> Result<Self, Failure> {
        let folder = tempfile::tempdir()?;
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let store = Store::open(&folder.path().display().to_string())?;
        let (down, shutdown) = tokio::sync::watch::channel(false);
        let (hive, url) = runtime.block_on(async {
            let access = Access::open();
            let hive = Hive::open(HiveSettings {
                store,
                access,
                byte_budget: 4 << 30,
                deadlines: Default::default(),
            })
            .await?;
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
            let url = format!("http://{}", listener.local_addr()?);
            let server = Server { listener, tls: None, deadlines: Default::default() };
            tokio::spawn(skep_hive::serve(server, skep_hive::app(hive.clone()), shutdown));
            Ok::<_, Failure>((hive, url))
        })?;
        Ok(Self { runtime, hive, url, _folder: folder, _down: down })
    }

    pub(crate) fn client(&self) -> Result<Client, Failure> {
        let patience = Duration::from_secs(5);
        let url = self.url.clone();
        Ok(Client::new(ClientSettings { url, patience, ..ClientSettings::default() })?)
    }

    /// A run of any schema whose samples are nothing but numbers.
    pub(crate) fn create(
        &self,
        name: &str,
        schema: &Schema,
        samples: usize,
        policy: Value,
    ) -> Result<(), Failure> {
        let rows = |count: usize| {
            Table::new(vec![Column {
                name: "row".to_owned(),
                dtype: Dtype::U8,
                shape: vec![],
                bytes: vec![0; count],
            }])
        };
        let (train, test) = (rows(samples)?, rows(1)?);
        let dataset = Dataset {
            source: "nothing".to_owned(),
            train,
            validation: None,
            test,
            assets: Vec::new(),
        };
        let settings = PrepareSettings {
            shards: Some(1),
            copies: 1,
            validation: 0.0,
            split: RowSplit::Shuffled,
        };
        let mut job = Job::default();
        job.train.batch = 1;
        job.run.steps = Some(0);
        job.policy = object(policy);
        // Checkpoints of a bench would measure the disk.
        job.checkpoint.seconds = 1e6;
        let layout = std::sync::Arc::new(Layout::of_version(schema, Encoding::F32)?);
        let version0 = Frame::zeros(layout);
        self.create_run(name, job, schema, &dataset.prepare(&settings)?, &version0)
    }

    /// LeNet-5 on the built-in digits.
    pub(crate) fn create_lenet(
        &self,
        name: &str,
        policy: Value,
        every: u64,
    ) -> Result<(), Failure> {
        let task = skep_learn::tasks().into_iter().next().ok_or("no task")?;
        let mut job = task.defaults();
        job.policy = object(policy);
        job.run.steps = Some(0);
        job.optimiser = object(json!({ "kind": "sgd", "rate": 0.01 }));
        job.train.every = every;
        let dataset = task.dataset(&task.defaults())?;
        let settings = PrepareSettings {
            shards: None,
            copies: 1,
            validation: 0.05,
            split: RowSplit::Shuffled,
        };
        let compute = task.compute(&job)?;
        let version0 = compute.initial(0)?;
        self.create_run(name, job, compute.schema(), &dataset.prepare(&settings)?, &version0)
    }

    fn create_run(
        &self,
        name: &str,
        job: Job,
        schema: &Schema,
        data: &Prepared,
        version0: &Frame,
    ) -> Result<(), Failure> {
        let spec = RunSpec {
            name: name.to_owned(),
            job,
            schema: schema.clone(),
            manifest: data.manifest.clone(),
            made_by: "bench".to_owned(),
        };
        self.runtime.block_on(async {
            for (shard, bytes) in &data.shards {
                self.hive.put_shard(&shard.hash, Bytes::clone(bytes)).await?;
            }
            self.hive.create(spec, version0.as_bytes()).await.map_err(|error| error.0.message)?;
            Ok(())
        })
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// A program beside this one.
pub(crate) fn program(name: &str) -> Result<PathBuf, Failure> {
    let path = std::env::current_exe()?.with_file_name(name);
    if path.exists() { Ok(path) } else { Err(format!("{} is not built", path.display()).into()) }
}

/// Ends a process when the measurement is over.
pub(crate) struct Ended(pub(crate) Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn measure() -> Result<Vec<Row>, Failure> {
    let hive = TestHive::start()?;
    let client = hive.client()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut times = Vec::new();
    let mut memory: f64 = 0.0;
    for round in 0..7 {
        let run = format!("first-{round}");
        hive.create_lenet(&run, json!({ "kind": "async" }), 1)?;
        let start = Instant::now();
        let child = Command::new(program("skep")?)
            .args(["--log", "error", "worker", "--hive", &hive.url, "--run", &run])
            .stdout(Stdio::null())
            .spawn()?;
        let child = Ended(child);
        // Every contribution makes a version here: version 1 is the first gradient accepted.
        let mut known = 0;
        while known == 0 {
            known = runtime.block_on(client.run(&run))?.version.number;
            if start.elapsed() > Duration::from_secs(10) {
                return Err("no gradient in 10 seconds".into());
            }
        }
        if round > 0 {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        while known < 600 && start.elapsed() < Duration::from_secs(20) {
            known = runtime.block_on(client.run(&run))?.version.number;
            memory = memory.max(peak_mebibytes(child.0.id())?);
            std::thread::sleep(Duration::from_millis(5));
        }
        runtime.block_on(client.change_run(&run, skep_wire::RunAction::Stop))?;
    }
    let time = median(&mut times);
    Ok(vec![
        Row::new(
            "worker's peak memory, MiB",
            format!("{memory:.1} MiB"),
            "limit 32 MiB".to_owned(),
            memory,
            Target::AtMost(32.0),
        ),
        Row::new(
            "exec to first gradient accepted, ms",
            format!("{time:.0} ms"),
            "limit 150 ms".to_owned(),
            time,
            Target::AtMost(150.0),
        ),
    ])
}

/// The most memory a process ever held.
pub(crate) fn peak_mebibytes(process: u32) -> Result<f64, Failure> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find(|line| line.starts_with("VmHWM")).ok_or("no VmHWM")?;
    let kibibytes: f64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kibibytes / 1024.0)
}
