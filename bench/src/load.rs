//! Contributions per second of one hive at LeNet size, with 64 workers connected.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::json;
use skep_wire::{ContributionKind, Encoding, Envelope, Frame, Layout, LeaseAnswer, LeaseRequest};
use skep_worker::{Client, ClientSettings};

use crate::Failure;
use crate::process::TestHive;
use crate::rows::{Row, Target};

const WORKERS: usize = 64;
const SECONDS: f64 = 5.0;

pub(crate) fn measure() -> Result<Vec<Row>, Failure> {
    let hive = TestHive::start()?;
    hive.create_lenet("load", json!({ "kind": "batch", "size": 4 }), 1)?;
    let output = Command::new(std::env::current_exe()?)
        .args(["load", &hive.url, "load"])
        .stderr(Stdio::inherit())
        .output()?;
    let rate: f64 = String::from_utf8_lossy(&output.stdout).trim().parse()?;
    let megabytes = rate * 2.0 * 61_706.0 * 4.0 / 1e6;
    Ok(vec![Row::new(
        "contributions/s of one hive, LeNet size, 64 workers connected",
        format!("{rate:.0}/s, {megabytes:.0} MB/s in and out"),
        "generator on the same 2 cores".to_owned(),
        rate,
        Target::None,
    )])
}

/// Pushes as fast as the hive takes it, from 64 connections; prints contributions per second.
pub(crate) fn generate(arguments: &[String]) -> Result<(), Failure> {
    let [url, run] = arguments else { return Err("load URL RUN".into()) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let rate = runtime.block_on(async {
        let client = client(url)?;
        let view = client.run(run).await?;
        let layout = Arc::new(Layout::of_gradient(&view.schema, Encoding::F32)?);
        let body = Bytes::from_owner(Frame::zeros(layout));
        let start = Instant::now();
        let until = start + Duration::from_secs_f64(SECONDS);
        let mut workers = tokio::task::JoinSet::new();
        for at in 0..WORKERS {
            workers.spawn(push(url.clone(), run.clone(), at, body.clone(), until));
        }
        let mut pushed = 0;
        while let Some(count) = workers.join_next().await {
            pushed += count??;
        }
        Ok::<_, Failure>(pushed as f64 / start.elapsed().as_secs_f64())
    })?;
    println!("{rate}");
    Ok(())
}

fn client(url: &str) -> Result<Client, Failure> {
    let patience = Duration::from_secs(5);
    Ok(Client::new(ClientSettings { url: url.to_owned(), patience, ..ClientSettings::default() })?)
}

async fn push(
    url: String,
    run: String,
    at: usize,
    body: Bytes,
    until: Instant,
) -> Result<u64, Failure> {
    let client = client(&url)?;
    let mut pushed = 0;
    let mut have = None;
    while Instant::now() < until {
        let request = LeaseRequest {
            worker: format!("load-{at}"),
            engine: String::new(),
            seconds_left: None,
            has: vec![],
            only: None,
            kinds: vec![],
            wait: 1.0,
            waiting: 0.0,
        };
        let LeaseAnswer::Lease(lease) = client.lease(&run, &request).await? else { continue };
        let mut first = lease.first;
        let mut sequence = 0;
        while first < lease.first + lease.count && Instant::now() < until {
            let count = lease.chunk.min(lease.first + lease.count - first);
            let envelope = Envelope {
                lease: lease.id,
                sequence,
                first,
                count,
                base: have.unwrap_or(lease.base),
                kind: ContributionKind::Gradient,
                encoding: Encoding::F32,
                loss: Some(1.0),
                want: Some(Encoding::F32),
                have,
                without: None,
            };
            match client.contribute(&run, &envelope, body.clone()).await {
                Ok((receipt, _)) => have = Some(receipt.version),
                Err(error) if error.code().is_some() => break,
                Err(error) => return Err(error.into()),
            }
            pushed += 1;
            sequence += 1;
            first += count;
        }
    }
    Ok(pushed)
}
