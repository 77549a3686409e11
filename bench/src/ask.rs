//! A client that asks one question again and again over 64 connections: the same one for every
//! server. A process of its own, so that it shares nothing with them.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, header};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::Failure;

const CONNECTIONS: usize = 64;

/// What came of it.
pub(crate) struct Asked {
    /// Answers per second.
    pub(crate) rate: f64,
    /// 99 of 100 answers took at most so many milliseconds.
    pub(crate) slowest_percent: f64,
}

impl Asked {
    /// Asks for so many seconds. Every answer must be a success.
    pub(crate) fn of(url: &str, kind: &str, body: &[u8], seconds: f64) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["ask", url, kind, &seconds.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        child.stdin.take().ok_or("no pipe")?.write_all(body)?;
        let output = child.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let numbers: Vec<f64> =
            text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match numbers[..] {
            [rate, slowest_percent] if output.status.success() => {
                Ok(Self { rate, slowest_percent })
            }
            _ => Err(format!("{url} was not answered").into()),
        }
    }
}

/// The process: asks, and prints answers per second and the 99th percentile in milliseconds.
pub(crate) fn generate(arguments: &[String]) -> Result<(), Failure> {
    let [url, kind, seconds] = arguments else { return Err("ask URL TYPE SECONDS".into()) };
    let mut body = Vec::new();
    std::io::Read::read_to_end(&mut std::io::stdin(), &mut body)?;
    let (body, seconds) = (Bytes::from(body), seconds.parse()?);
    let address = url.trim_start_matches("http://").split('/').next().unwrap_or("").to_owned();
    let path = url.trim_start_matches("http://").trim_start_matches(&address).to_owned();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut times = runtime.block_on(async {
        let until = Instant::now() + Duration::from_secs_f64(seconds);
        let mut askers = tokio::task::JoinSet::new();
        for _ in 0..CONNECTIONS {
            let asker = Asker {
                address: address.clone(),
                path: path.clone(),
                kind: kind.clone(),
                body: body.clone(),
            };
            askers.spawn(asker.ask(until));
        }
        let mut times = Vec::new();
        while let Some(more) = askers.join_next().await {
            times.extend(more??);
        }
        Ok::<_, Failure>(times)
    })?;
    times.sort_unstable();
    let at = (times.len() * 99 / 100).min(times.len().saturating_sub(1));
    let slow = times.get(at).copied().unwrap_or(Duration::MAX);
    println!("{} {}", times.len() as f64 / seconds, slow.as_secs_f64() * 1e3);
    Ok(())
}

struct Asker {
    address: String,
    path: String,
    kind: String,
    body: Bytes,
}

impl Asker {
    /// How long each answer took. A server that closes connections is connected to again, and that
    /// counts.
    async fn ask(self, until: Instant) -> Result<Vec<Duration>, Failure> {
        let mut times = Vec::new();
        let mut connection: Option<SendRequest<Full<Bytes>>> = None;
        while Instant::now() < until {
            let start = Instant::now();
            let mut sender = match connection.take() {
                Some(sender) => sender,
                None => self.connect().await?,
            };
            if sender.ready().await.is_err() {
                sender = self.connect().await?;
            }
            let request = Request::post(&self.path)
                .header(header::HOST, &self.address)
                .header(header::CONTENT_TYPE, &self.kind)
                .body(Full::new(self.body.clone()))?;
            let Ok(response) = sender.send_request(request).await else {
                // Closed between two requests.
                continue;
            };
            let status = response.status();
            let answer = response.into_body().collect().await?.to_bytes();
            if !status.is_success() {
                return Err(format!("{status}: {}", String::from_utf8_lossy(&answer)).into());
            }
            times.push(start.elapsed());
            connection = Some(sender);
        }
        Ok(times)
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, Failure> {
        let stream = TcpStream::connect(&self.address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(sender)
    }
}
