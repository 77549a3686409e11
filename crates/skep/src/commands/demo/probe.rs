//! Asks the page without a pause, on several connections, and counts what comes back.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use skep_data::{Column, Table};
use skep_wire::Version;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use crate::failure::Failure;

/// Connections that ask at the same time.
const CONNECTIONS: usize = 4;
/// How long each rests after an answer, so that training has the processors.
const REST: Duration = Duration::from_millis(30);
/// An answer that takes longer counts as none.
const PATIENCE: Duration = Duration::from_secs(10);
/// How many of the test set's digits are asked about, in turn.
const QUESTIONS: usize = 500;
/// Over how many answers the share of right ones is taken.
const RECENT: usize = 200;

/// What came back so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    /// Answered with 200 and the probabilities of a version that is named.
    pub(super) answered: u64,
    /// Everything else: another status, a connection that broke, no answer in time.
    pub(super) dropped: u64,
    /// What the first of those was.
    pub(super) first_dropped: Option<String>,
    /// The versions that answered.
    pub(super) versions: BTreeSet<Version>,
    pub(super) latest: Option<Version>,
    pub(super) slowest: Duration,
    recent: VecDeque<bool>,
}

impl Tally {
    /// The share of the latest answers that were the digit on the picture.
    pub(super) fn right(&self) -> Option<f64> {
        let right = self.recent.iter().filter(|right| **right).count();
        (!self.recent.is_empty()).then(|| right as f64 / self.recent.len() as f64)
    }
}

struct Question {
    body: Bytes,
    label: usize,
}

/// Everyone who asks.
pub(super) struct Probe {
    tally: Arc<Mutex<Tally>>,
    over: Arc<AtomicBool>,
    asking: Vec<JoinHandle<()>>,
}

impl Probe {
    /// Waits until the page is ready; from then on every request counts.
    pub(super) async fn start(
        port: u16,
        model: &str,
        test: &Table,
        stop: &AtomicBool,
    ) -> Result<Self, Failure> {
        let patience = Instant::now() + Duration::from_secs(60);
        while ready(port).await.is_none() {
            if Instant::now() > patience || stop.load(Ordering::Relaxed) {
                return Err(Failure::fault("the page does not become ready"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let (tally, over) = (Arc::<Mutex<Tally>>::default(), Arc::<AtomicBool>::default());
        let questions = Arc::new(questions(test)?);
        let asking = (0..CONNECTIONS).map(|first| {
            let (tally, over, questions) = (tally.clone(), over.clone(), questions.clone());
            let path = format!("/v2/models/{model}/infer");
            tokio::spawn(async move {
                let mut connection = None;
                let turns = questions.iter().cycle().skip(first * QUESTIONS / CONNECTIONS);
                for question in turns {
                    if over.load(Ordering::Relaxed) {
                        return;
                    }
                    let start = Instant::now();
                    let asked = ask(&mut connection, port, &path, &question.body);
                    let answer = match tokio::time::timeout(PATIENCE, asked).await {
                        Ok(answer) => answer,
                        Err(_) => Err(format!("no answer in {} s", PATIENCE.as_secs())),
                    };
                    if answer.is_err() {
                        connection = None;
                    }
                    note(&mut lock(&tally), answer, question.label, start.elapsed());
                    tokio::time::sleep(REST).await;
                }
            })
        });
        Ok(Self { asking: asking.collect(), tally, over })
    }

    pub(super) fn tally(&self) -> Tally {
        lock(&self.tally).clone()
    }

    /// The version that answered last.
    pub(super) fn latest(&self) -> Option<Version> {
        lock(&self.tally).latest
    }

    /// Lets the last requests be answered.
    pub(super) async fn stop(self) -> Tally {
        self.over.store(true, Ordering::Relaxed);
        for asking in self.asking {
            let _ = asking.await;
        }
        lock(&self.tally).clone()
    }
}

fn lock(tally: &Mutex<Tally>) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

fn note(tally: &mut Tally, answer: Result<(Version, usize), String>, label: usize, took: Duration) {
    tally.slowest = tally.slowest.max(took);
    match answer {
        Ok((version, digit)) => {
            tally.answered += 1;
            tally.versions.insert(version);
            tally.latest = Some(version);
            tally.recent.push_back(digit == label);
            if tally.recent.len() > RECENT {
                tally.recent.pop_front();
            }
        }
        Err(reason) => {
            tally.dropped += 1;
            tally.first_dropped.get_or_insert(reason);
        }
    }
}

/// Digits of the test set, as requests of the Open Inference Protocol.
fn questions(test: &Table) -> Result<Vec<Question>, Failure> {
    let (Some(images), Some(labels)) = (test.column("image"), test.column("label")) else {
        return Err(Failure::fault("the test set has no images with labels"));
    };
    let size = images.u8s().len() / test.rows().max(1);
    let pixels = images.u8s().chunks_exact(size.max(1));
    let label = |column: &Column, at: usize| usize::from(column.u8s()[at]);
    let questions = pixels.take(QUESTIONS).enumerate().map(|(at, pixels)| {
        let input = json!({
            "name": "image",
            "datatype": "UINT8",
            "shape": [1, 1, images.shape[0], images.shape[1]],
            "data": pixels,
        });
        let body = json!({ "inputs": [input], "outputs": [{ "name": "probabilities" }] });
        Question { body: Bytes::from(body.to_string()), label: label(labels, at) }
    });
    Ok(questions.collect())
}

type Connection = SendRequest<Full<Bytes>>;

async fn connect(port: u16) -> Result<Connection, String> {
    let stream =
        TcpStream::connect(("127.0.0.1", port)).await.map_err(|error| error.to_string())?;
    let _ = stream.set_nodelay(true);
    let (sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
    // How the connection ends shows in the request that it carried.
    tokio::spawn(async move { connection.await.ok() });
    Ok(sender)
}

async fn ready(port: u16) -> Option<()> {
    let mut connection = connect(port).await.ok()?;
    let request = Request::get("/v2/health/ready").header(header::HOST, "127.0.0.1");
    let request = request.body(Full::new(Bytes::new())).ok()?;
    let answer = connection.send_request(request).await.ok()?;
    (answer.status() == StatusCode::OK).then_some(())
}

/// One question: the version that answered, and what it takes the picture for.
async fn ask(
    connection: &mut Option<Connection>,
    port: u16,
    path: &str,
    body: &Bytes,
) -> Result<(Version, usize), String> {
    let text = |error: hyper::Error| error.to_string();
    let open = match connection {
        Some(open) => open,
        None => connection.insert(connect(port).await?),
    };
    open.ready().await.map_err(text)?;
    let request = Request::post(path)
        .header(header::HOST, "127.0.0.1")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(body.clone()))
        .map_err(|error| error.to_string())?;
    let answer = open.send_request(request).await.map_err(text)?;
    let status = answer.status();
    let bytes = answer.into_body().collect().await.map_err(text)?.to_bytes();
    if status != StatusCode::OK {
        return Err(format!("{status}: {}", String::from_utf8_lossy(&bytes)));
    }
    let json: Value = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    let version = json["model_version"].as_str().and_then(|text| text.parse().ok());
    let shares = json["outputs"][0]["data"].as_array();
    let (Some(version), Some(shares)) = (version, shares) else {
        return Err(format!("not an answer: {json}"));
    };
    let share = |at: &usize| shares[*at].as_f64().unwrap_or(f64::NAN);
    let digit = (0..shares.len()).max_by(|a, b| share(a).total_cmp(&share(b)));
    Ok((version, digit.unwrap_or(usize::MAX)))
}
