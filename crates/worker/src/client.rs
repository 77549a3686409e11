//! The client of a hive: every route as a method, with retries where a repeat changes nothing.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use serde::Serialize;
use serde::de::DeserializeOwned;
use skep_wire::{
    Encoding, Envelope, ErrorBody, ErrorCode, Frame, GiveBack, History, KeyIssued, KeyRequest,
    Layout, LeaseAnswer, LeaseId, LeaseRequest, LogLine, Progress, Receipt, Renewed, RunAction,
    RunChange, RunSummary, RunView, Version, header as own,
};

use crate::ClientError;
use crate::connection::{Connection, Target};

/// How to reach a hive.
#[derive(Clone, Debug, Default)]
pub struct ClientSettings {
    /// Its address.
    pub url: String,
    /// The key, if it needs one.
    pub key: Option<String>,
    /// The hash of its certificate, to trust that one alone.
    pub pin: Option<String>,
    /// A file of certificate authorities to trust instead of the public ones.
    pub authority: Option<PathBuf>,
    /// How long to go on trying when it does not answer.
    pub patience: Duration,
    /// Set to call everything off.
    pub stop: Arc<AtomicBool>,
}

/// A client of one hive.
pub struct Client {
    target: Target,
    settings: ClientSettings,
    /// Connections that no request is using.
    idle: Mutex<Vec<Connection>>,
}

/// An answer, read whole.
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    words: Vec<u64>,
    length: usize,
}

impl Answer {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.length]
    }
}

impl AsRef<[u8]> for Answer {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

/// Parameters that a hive sent.
pub struct Pulled {
    /// Which version.
    pub version: Version,
    words: Vec<u64>,
    length: usize,
}

impl Pulled {
    /// The parameters; `layout` is the run's `F32` one.
    pub fn frame(self, layout: &Arc<Layout>) -> Result<Frame, ClientError> {
        match Frame::adopt(layout, self.words, self.length) {
            Ok(frame) => Ok(frame),
            Err(words) => {
                let bytes: &[u8] = bytemuck::cast_slice(&words);
                Ok(Frame::read(layout, &bytes[..self.length])?)
            }
        }
    }

    /// The safetensors file as it came.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.length]
    }
}

/// What a request is.
struct Call<'call> {
    method: Method,
    path: &'call str,
    headers: HeaderMap,
    body: Bytes,
    /// How long the answer may take.
    deadline: Duration,
}

impl<'call> Call<'call> {
    fn new(method: Method, path: &'call str) -> Self {
        Self {
            method,
            path,
            headers: HeaderMap::new(),
            body: Bytes::new(),
            deadline: Duration::from_secs(120),
        }
    }

    fn json(mut self, message: &impl Serialize) -> Result<Self, ClientError> {
        let json = serde_json::to_vec(message)
            .map_err(|error| ClientError::Settings(error.to_string()))?;
        self.body = Bytes::from(json);
        self.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(self)
    }
}

impl Client {
    /// Checks the settings; connects with the first request.
    pub fn new(settings: ClientSettings) -> Result<Self, ClientError> {
        let target = Target::new(&settings)?;
        Ok(Self { target, settings, idle: Mutex::default() })
    }

    /// The hive's address.
    pub fn url(&self) -> &str {
        &self.settings.url
    }

    /// One attempt.
    async fn once(&self, call: &Call<'_>) -> Result<Answer, ClientError> {
        let unreachable =
            |reason: String| ClientError::Unreachable { url: self.settings.url.clone(), reason };
        let idle = {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.retain(Connection::is_usable);
            idle.pop()
        };
        let mut connection = match idle {
            Some(connection) => connection,
            None => self.target.connect().await?,
        };
        let exchange = async {
            let mut request = Request::builder().method(&call.method).uri(call.path);
            request = request.header(header::HOST, &self.target.authority);
            if let Some(key) = &self.settings.key {
                request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
            }
            let mut request = request
                .body(Full::new(call.body.clone()))
                .map_err(|error| ClientError::Settings(error.to_string()))?;
            request.headers_mut().extend(call.headers.clone());
            let response = connection.send(request).await.map_err(unreachable)?;
            let (parts, mut body) = response.into_parts();
            let declared: Option<usize> = parts
                .headers
                .get(header::CONTENT_LENGTH)
                .and_then(|value| value.to_str().ok())
                .and_then(|text| text.parse().ok());
            let mut words: Vec<u64> = vec![0; declared.unwrap_or(0).min(1 << 32).div_ceil(8)];
            let mut length = 0;
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| unreachable(error.to_string()))?;
                let Ok(data) = frame.into_data() else { continue };
                let end = length + data.len();
                if end > words.len() * 8 {
                    words.resize(end.div_ceil(8).max(words.len() * 2), 0);
                }
                bytemuck::cast_slice_mut::<u64, u8>(&mut words)[length..end].copy_from_slice(&data);
                length = end;
            }
            Ok::<_, ClientError>(Answer {
                status: parts.status,
                headers: parts.headers,
                words,
                length,
            })
        };
        let answer = tokio::time::timeout(call.deadline, exchange)
            .await
            .map_err(|_| unreachable("the answer took too long".to_owned()))??;
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        Ok(answer)
    }

    /// Attempts until it succeeds, fails for good, or patience is at an end: backoff from 50 ms to
    /// 2 s, with jitter so that a crowd does not come back as one.
    async fn send(&self, call: Call<'_>) -> Result<Answer, ClientError> {
        let start = Instant::now();
        let mut pause = Duration::from_millis(50);
        let mut told = false;
        loop {
            let error = match self.unless_stopped(self.once(&call)).await? {
                Ok(answer) if answer.status.is_success() => return Ok(answer),
                Ok(answer) if answer.status == StatusCode::NOT_MODIFIED => return Ok(answer),
                Ok(answer) => ClientError::Refused(error_body(&answer)),
                Err(error) => error,
            };
            if !error.is_passing() || start.elapsed() + pause > self.settings.patience {
                return Err(error);
            }
            if !told && start.elapsed() > Duration::from_secs(1) {
                told = true;
                tracing::warn!("{error}; trying again");
            }
            let jittered = pause.mul_f64(0.5 + f64::from(random_byte()) / 256.0);
            self.unless_stopped(tokio::time::sleep(jittered)).await?;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }

    /// Waits for something unless everything is called off meanwhile.
    async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Result<T, ClientError> {
        let stopped = async {
            while !self.settings.stop.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = stopped => Err(ClientError::Stopped),
        }
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        read_json(&self.send(Call::new(Method::GET, path)).await?)
    }

    /// All runs.
    pub async fn runs(&self) -> Result<Vec<RunSummary>, ClientError> {
        self.get("/v1/runs").await
    }

    /// One run.
    pub async fn run(&self, run: &str) -> Result<RunView, ClientError> {
        self.get(&format!("/v1/runs/{run}")).await
    }

    /// One run as one looks at it again and again.
    pub async fn progress(&self, run: &str) -> Result<Progress, ClientError> {
        self.get(&format!("/v1/runs/{run}/progress")).await
    }

    /// How a run went, in at most so many points.
    pub async fn history(&self, run: &str, points: usize) -> Result<History, ClientError> {
        self.get(&format!("/v1/runs/{run}/history?points={points}")).await
    }

    /// Creates a run from a safetensors file with its description in the metadata.
    pub async fn create_run(&self, file: Bytes) -> Result<RunView, ClientError> {
        let mut call = Call::new(Method::POST, "/v1/runs");
        call.body = file;
        read_json(&self.send(call).await?)
    }

    /// Pauses, resumes or stops a run.
    pub async fn change_run(&self, run: &str, action: RunAction) -> Result<RunView, ClientError> {
        let path = format!("/v1/runs/{run}");
        let call = Call::new(Method::PATCH, &path).json(&RunChange { action })?;
        read_json(&self.send(call).await?)
    }

    /// Deletes a run.
    pub async fn delete_run(&self, run: &str) -> Result<(), ClientError> {
        let path = format!("/v1/runs/{run}");
        self.send(Call::new(Method::DELETE, &path)).await.map(drop)
    }

    /// Sends a shard.
    pub async fn put_shard(&self, hash: &str, bytes: Bytes) -> Result<(), ClientError> {
        let path = format!("/v1/shards/{hash}");
        let mut call = Call::new(Method::PUT, &path);
        call.body = bytes;
        self.send(call).await.map(drop)
    }

    /// Fetches a shard.
    pub async fn shard(&self, run: &str, hash: &str) -> Result<impl AsRef<[u8]>, ClientError> {
        let path = format!("/v1/runs/{run}/shards/{hash}");
        self.send(Call::new(Method::GET, &path)).await
    }

    /// Pulls parameters: a version, or the newest.
    pub async fn parameters(
        &self,
        run: &str,
        version: Option<Version>,
        encoding: Encoding,
    ) -> Result<Pulled, ClientError> {
        let encoding = encoding.as_str();
        let mut path = format!("/v1/runs/{run}/parameters?encoding={encoding}");
        if let Some(version) = version {
            path.push_str(&format!("&version={version}"));
        }
        pulled(self.send(Call::new(Method::GET, &path)).await?)
    }

    /// Pulls the version that did best on the validation split.
    pub async fn best_parameters(&self, run: &str) -> Result<Pulled, ClientError> {
        let path = format!("/v1/runs/{run}/parameters?version=best");
        pulled(self.send(Call::new(Method::GET, &path)).await?)
    }

    /// Waits for a version other than `known` and pulls it; `None` if none came out in time.
    pub async fn newer_parameters(
        &self,
        run: &str,
        known: Option<Version>,
        wait: Duration,
    ) -> Result<Option<Pulled>, ClientError> {
        let encoding = Encoding::F32.as_str();
        let wait = wait.as_secs_f64();
        let path = format!("/v1/runs/{run}/parameters?encoding={encoding}&wait={wait}s");
        let mut call = Call::new(Method::GET, &path);
        if let Some(version) = known {
            let tag = HeaderValue::try_from(format!("\"{version}.{encoding}\""))
                .map_err(|error| ClientError::Settings(error.to_string()))?;
            call.headers.insert(header::IF_NONE_MATCH, tag);
        }
        call.deadline += Duration::from_secs_f64(wait);
        let answer = self.send(call).await?;
        if answer.status == StatusCode::NOT_MODIFIED {
            return Ok(None);
        }
        pulled(answer).map(Some)
    }

    /// Asks for work.
    pub async fn lease(
        &self,
        run: &str,
        request: &LeaseRequest,
    ) -> Result<LeaseAnswer, ClientError> {
        let path = format!("/v1/runs/{run}/leases");
        let mut call = Call::new(Method::POST, &path).json(request)?;
        call.deadline = Duration::from_secs_f64(request.wait + 30.0);
        read_json(&self.send(call).await?)
    }

    /// A heartbeat.
    pub async fn renew(&self, run: &str, lease: LeaseId) -> Result<Renewed, ClientError> {
        let path = format!("/v1/runs/{run}/leases/{lease}");
        let mut call = Call::new(Method::PUT, &path);
        call.deadline = Duration::from_secs(10);
        read_json(&self.send(call).await?)
    }

    /// Gives a lease back. Tried once: a lease that cannot be given back lapses by itself.
    pub async fn give_back(
        &self,
        run: &str,
        lease: LeaseId,
        failure: Option<String>,
    ) -> Result<(), ClientError> {
        let path = format!("/v1/runs/{run}/leases/{lease}");
        let mut call = Call::new(Method::DELETE, &path).json(&GiveBack { failure })?;
        call.deadline = Duration::from_secs(5);
        let answer = self.once(&call).await?;
        if answer.status.is_success() {
            Ok(())
        } else {
            Err(ClientError::Refused(error_body(&answer)))
        }
    }

    /// Brings a contribution home; newer parameters come back in the same round trip if the
    /// envelope wants them. A repeat under the same sequence number changes nothing, so it is
    /// tried until it is answered.
    pub async fn contribute(
        &self,
        run: &str,
        envelope: &Envelope,
        body: Bytes,
    ) -> Result<(Receipt, Option<Pulled>), ClientError> {
        let path = format!("/v1/runs/{run}/contributions");
        let mut call = Call::new(Method::POST, &path);
        envelope.write(&mut call.headers);
        call.body = body;
        let answer = self.send(call).await?;
        let receipt = Receipt::read(&answer.headers)?;
        let pulled = (answer.length > 0).then_some(Pulled {
            version: receipt.version,
            words: answer.words,
            length: answer.length,
        });
        Ok((receipt, pulled))
    }

    /// Sends lines of a worker's log. Tried once: a log is not worth waiting for.
    pub async fn log(&self, run: &str, lines: &[LogLine]) -> Result<(), ClientError> {
        let path = format!("/v1/runs/{run}/logs");
        let mut call = Call::new(Method::POST, &path).json(&lines)?;
        call.deadline = Duration::from_secs(2);
        self.once(&call).await.map(drop)
    }

    /// What the run's workers said.
    pub async fn logs(&self, run: &str) -> Result<Vec<LogLine>, ClientError> {
        self.get(&format!("/v1/runs/{run}/logs")).await
    }

    /// Issues a key.
    pub async fn create_key(&self, request: &KeyRequest) -> Result<KeyIssued, ClientError> {
        read_json(&self.send(Call::new(Method::POST, "/v1/keys").json(request)?).await?)
    }

    /// Takes a key back.
    pub async fn revoke_key(&self, id: &str) -> Result<(), ClientError> {
        let path = format!("/v1/keys/{id}");
        self.send(Call::new(Method::DELETE, &path)).await.map(drop)
    }
}

fn pulled(answer: Answer) -> Result<Pulled, ClientError> {
    let version = answer
        .headers
        .get(own::VERSION)
        .and_then(|value| value.to_str().ok())
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| ClientError::Answer("no version".to_owned()))?;
    Ok(Pulled { version, words: answer.words, length: answer.length })
}

fn read_json<T: DeserializeOwned>(answer: &Answer) -> Result<T, ClientError> {
    serde_json::from_slice(answer.bytes()).map_err(|error| ClientError::Answer(error.to_string()))
}

fn error_body(answer: &Answer) -> ErrorBody {
    serde_json::from_slice(answer.bytes()).unwrap_or_else(|_| ErrorBody {
        code: match answer.status.as_u16() {
            401 => ErrorCode::Unauthorised,
            404 => ErrorCode::NotFound,
            502..=504 => ErrorCode::Closing,
            _ => ErrorCode::Internal,
        },
        message: format!("the hive answered {}", answer.status),
        hint: "is this the address of a hive?".to_owned(),
    })
}

fn random_byte() -> u8 {
    let mut byte = [0];
    // Without randomness there is only less jitter.
    let _ = getrandom::fill(&mut byte);
    byte[0]
}
