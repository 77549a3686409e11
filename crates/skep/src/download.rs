//! Downloads a large file: tried again when the connection breaks, resumed where it was cut, also by
//! another process than the one that began it. What has arrived lies in a file of its own, with a
//! note of which version of the file it is; so a server that has another one by now is noticed.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use indicatif::ProgressBar;
use skep_data::DataError;
use skep_worker::Web;
use tokio::net::TcpStream;
use url::Url;

use crate::failure::Failure;

/// Tries in a row that bring nothing.
const TRIES: u32 = 5;

/// The pause after the first of them; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(300);

/// How long a server may be silent.
const SILENCE: Duration = Duration::from_secs(30);

const MOST_REDIRECTIONS: usize = 5;

/// A file on its way.
pub(crate) struct Download<'web> {
    pub(crate) web: &'web Web,
    /// Where it is.
    pub(crate) url: Url,
    /// Where what has arrived is kept until it is whole.
    pub(crate) partial: PathBuf,
    /// More bytes than this are not taken.
    pub(crate) most: u64,
}

/// Why a try ended.
enum Trouble {
    /// Trying again may help. Whether anything arrived.
    Passing(String, bool),
    Lasting(Failure),
}

impl Download<'_> {
    /// Whether an earlier try left something to go on from.
    pub(crate) fn is_begun(&self) -> bool {
        self.partial.metadata().is_ok_and(|meta| meta.len() > 0)
    }

    /// Until all of it is there. What arrived stays for the next time, but no empty file does.
    pub(crate) async fn run(&self, progress: &ProgressBar) -> Result<(), Failure> {
        let result = self.keep_trying(progress).await;
        if result.is_err() && !self.is_begun() {
            self.discard();
        }
        result
    }

    async fn keep_trying(&self, progress: &ProgressBar) -> Result<(), Failure> {
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.partial)
            .map_err(|error| self.disk(error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Failure::mistake(format!(
                    "another process is downloading {}",
                    self.partial.display()
                )));
            }
            Err(TryLockError::Error(error)) => return Err(self.disk(error)),
        }
        let mut in_vain = 0;
        loop {
            let (reason, arrived) = match self.attempt(&mut file, progress).await {
                Ok(()) => break,
                Err(Trouble::Lasting(failure)) => return Err(failure),
                Err(Trouble::Passing(reason, arrived)) => (reason, arrived),
            };
            in_vain = if arrived { 1 } else { in_vain + 1 };
            if in_vain == TRIES {
                return Err(Failure::fault(format!("{}: {reason}", self.url))
                    .hint("run the same command again: it goes on where it stopped"));
            }
            progress.set_message(format!("{reason}; trying again"));
            tokio::time::sleep(FIRST_PAUSE * 2u32.pow(in_vain - 1)).await;
        }
        file.sync_all().map_err(|error| self.disk(error))
    }

    /// Deletes what has arrived.
    pub(crate) fn discard(&self) {
        for path in [self.partial.clone(), self.note()] {
            // Not there is as good.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Moves the whole file to its place.
    pub(crate) fn finish(&self, place: &Path) -> Result<(), Failure> {
        std::fs::rename(&self.partial, place).map_err(|error| self.disk(error))?;
        let _ = std::fs::remove_file(self.note());
        let folder = place.parent().unwrap_or(Path::new("."));
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(|error| self.disk(error))
    }

    /// Where it is written which version of the file has begun to arrive.
    fn note(&self) -> PathBuf {
        let mut name = self.partial.file_name().unwrap_or_default().to_owned();
        name.push(".version");
        self.partial.with_file_name(name)
    }

    fn disk(&self, error: std::io::Error) -> Failure {
        DataError::of_io(&self.partial.to_string_lossy(), error).into()
    }

    async fn attempt(&self, file: &mut File, progress: &ProgressBar) -> Result<(), Trouble> {
        let disk = |error| Trouble::Lasting(self.disk(error));
        let mut have = file.metadata().map_err(disk)?.len();
        let version = std::fs::read_to_string(self.note()).ok();
        let version = version.and_then(|text| HeaderValue::from_str(text.trim()).ok());
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let (1.., Some(version)) = (have, version)
            && let Ok(range) = HeaderValue::from_str(&format!("bytes={have}-"))
        {
            headers.insert(header::RANGE, range);
            headers.insert(header::IF_RANGE, version);
        }
        let response = self.ask(headers).await?;
        let status = response.status();
        match status {
            StatusCode::PARTIAL_CONTENT if start_of(&response) == Some(have) => {}
            // Another version, or a server that knows no parts: from the start.
            StatusCode::OK => {
                file.set_len(0).map_err(disk)?;
                have = 0;
                self.write_note(&response).map_err(disk)?;
            }
            StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE => {
                file.set_len(0).map_err(disk)?;
                let reason = format!("the server answered {status} with another part");
                return Err(Trouble::Passing(reason, false));
            }
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
                return Err(Trouble::Passing(format!("the server answered {status}"), false));
            }
            _ if status.is_server_error() => {
                return Err(Trouble::Passing(format!("the server answered {status}"), false));
            }
            _ => {
                let message = format!("{}: the server answered {status}", self.url);
                return Err(Trouble::Lasting(
                    Failure::mistake(message).hint("give another place with --mirror URL"),
                ));
            }
        }
        self.receive(response, have, file, progress).await
    }

    async fn receive(
        &self,
        response: Response<Incoming>,
        mut have: u64,
        file: &mut File,
        progress: &ProgressBar,
    ) -> Result<(), Trouble> {
        let length = response.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|text| text.to_str().ok()?.parse::<u64>().ok());
        let all = length.map(|length| have.saturating_add(length));
        let too_large = || {
            Trouble::Lasting(Failure::mistake(format!(
                "{}: it has more than {} bytes, which is not the file that is meant",
                self.url, self.most
            )))
        };
        if all.is_some_and(|all| all > self.most) {
            return Err(too_large());
        }
        if let Some(all) = all {
            progress.set_length(all);
        }
        progress.set_message("");
        progress.set_position(have);
        let mut body = response.into_body();
        let mut arrived = false;
        loop {
            let passing = |reason: String| Trouble::Passing(reason, arrived);
            let frame = tokio::time::timeout(SILENCE, body.frame()).await;
            let frame = frame
                .map_err(|_| passing(format!("nothing came for {} seconds", SILENCE.as_secs())))?;
            let Some(frame) = frame else { break };
            let frame = frame.map_err(|error| passing(format!("the answer broke off: {error}")))?;
            let Some(bytes) = frame.data_ref() else { continue };
            have += bytes.len() as u64;
            if have > self.most {
                return Err(too_large());
            }
            file.write_all(bytes).map_err(|error| Trouble::Lasting(self.disk(error)))?;
            arrived = true;
            progress.set_position(have);
        }
        match all {
            Some(all) if have < all => {
                Err(Trouble::Passing("the answer broke off".to_owned(), arrived))
            }
            _ => Ok(()),
        }
    }

    /// Keeps what tells this version of the file from others; nothing where the server does not say.
    fn write_note(&self, response: &Response<Incoming>) -> std::io::Result<()> {
        let headers = response.headers();
        // A weak tag stands for files that merely mean the same.
        let tag = headers.get(header::ETAG).filter(|tag| !tag.as_bytes().starts_with(b"W/"));
        let version = tag.or_else(|| headers.get(header::LAST_MODIFIED));
        match version.and_then(|version| version.to_str().ok()) {
            Some(version) => std::fs::write(self.note(), version),
            None => match std::fs::remove_file(self.note()) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            },
        }
    }

    /// The answer behind all redirections.
    async fn ask(&self, headers: HeaderMap) -> Result<Response<Incoming>, Trouble> {
        let mut url = self.url.clone();
        for _ in 0..=MOST_REDIRECTIONS {
            let asked = tokio::time::timeout(SILENCE, self.step(&url, headers.clone())).await;
            let silent = format!("no answer in {} seconds", SILENCE.as_secs());
            let response =
                asked.unwrap_or(Err(silent)).map_err(|reason| Trouble::Passing(reason, false))?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            let next = response.headers().get(header::LOCATION);
            let next = next.and_then(|text| url.join(text.to_str().ok()?).ok());
            url =
                next.filter(|next| matches!(next.scheme(), "http" | "https")).ok_or_else(|| {
                    let message = format!("{}: it redirects to nowhere", self.url);
                    Trouble::Lasting(Failure::fault(message))
                })?;
        }
        let message = format!("{}: more than {MOST_REDIRECTIONS} redirections", self.url);
        Err(Trouble::Lasting(Failure::fault(message)))
    }

    async fn step(&self, url: &Url, headers: HeaderMap) -> Result<Response<Incoming>, String> {
        let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let port = url.port_or_known_default().unwrap_or(80);
        let stream = TcpStream::connect((host, port)).await;
        let stream = stream.map_err(|error| format!("cannot be reached: {error}"))?;
        self.web.get(stream, url, headers).await
    }
}

/// Where the part begins that an answer has: `bytes 100-199/200`.
fn start_of(response: &Response<Incoming>) -> Option<u64> {
    let range = response.headers().get(header::CONTENT_RANGE)?.to_str().ok()?;
    range.trim().strip_prefix("bytes ")?.split_once('-')?.0.trim().parse().ok()
}
