//! A dataset's home on loopback: a small HTTP server that knows parts of files and versions of them,
//! and that can be told to misbehave.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How the home behaves.
#[derive(Default)]
pub(crate) struct Manners {
    pub(crate) files: HashMap<String, Vec<u8>>,
    /// The tag of all files; none is sent where it is empty.
    pub(crate) tag: String,
    /// Closes the connection after so many bytes of a body.
    pub(crate) cut_after: Option<usize>,
    /// Sends so many bytes of a body, and then nothing while the connection lasts.
    pub(crate) stall_after: Option<usize>,
    /// Sends whole files whatever part is asked for.
    pub(crate) ignore_ranges: bool,
    /// Answers that so many next requests get.
    pub(crate) statuses: Vec<u16>,
}

/// What a client asked for: the path, and the first byte if not all of it.
pub(crate) type Asked = (String, Option<usize>);

#[derive(Clone)]
pub(crate) struct Home {
    manners: Arc<Mutex<Manners>>,
    asked: Arc<Mutex<Vec<Asked>>>,
    port: u16,
}

impl Home {
    /// Serves until the test process ends.
    pub(crate) fn start(files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let port = listener.local_addr().expect("is bound").port();
        let files = files.into_iter().collect();
        let tag = "\"first\"".to_owned();
        let manners = Manners { files, tag, ..Manners::default() };
        let home = Self { manners: Arc::new(Mutex::new(manners)), asked: Arc::default(), port };
        let ours = home.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let home = ours.clone();
                // A client that goes away is the client's business.
                std::thread::spawn(move || home.answer(stream).ok());
            }
        });
        home
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/sets", self.port)
    }

    pub(crate) fn manners(&self) -> MutexGuard<'_, Manners> {
        self.manners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was asked since the last time.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.asked.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn answer(&self, stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let (mut start, mut condition) = (None, None);
        loop {
            line.clear();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            match name.to_ascii_lowercase().as_str() {
                "range" => {
                    let number = value.trim_start_matches("bytes=").trim_end_matches('-');
                    start = number.parse::<usize>().ok();
                }
                "if-range" => condition = Some(value.to_owned()),
                _ => {}
            }
        }
        let mut stream = reader.into_inner();
        let (head, body, stall) = {
            let mut manners = self.manners();
            let name = path.trim_start_matches("/sets/").to_owned();
            self.asked.lock().unwrap_or_else(PoisonError::into_inner).push((name.clone(), start));
            if let Some(status) = manners.statuses.pop() {
                return write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n");
            }
            let Some(file) = manners.files.get(&name) else {
                return write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
            };
            let same = condition.is_none_or(|condition| condition == manners.tag);
            let start = start.filter(|&start| !manners.ignore_ranges && same && start < file.len());
            let mut head = match start {
                Some(start) => format!(
                    "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {start}-{}/{}\r\n",
                    file.len() - 1,
                    file.len()
                ),
                None => "HTTP/1.1 200 OK\r\n".to_owned(),
            };
            let body = file[start.unwrap_or(0)..].to_vec();
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
            if !manners.tag.is_empty() {
                head.push_str(&format!("ETag: {}\r\n", manners.tag));
            }
            let end = manners.cut_after.or(manners.stall_after).unwrap_or(usize::MAX);
            let end = end.min(body.len());
            (head + "\r\n", body[..end].to_vec(), manners.stall_after.is_some())
        };
        stream.write_all(head.as_bytes())?;
        stream.write_all(&body)?;
        stream.flush()?;
        if stall {
            // Until the client is gone.
            let _ = stream.peek(&mut [0]);
        }
        Ok(())
    }
}
