//! A running `skep serve`, asked over plain sockets.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::{Process, run_to_end, skep_command, wait_for};

/// A running `skep serve`.
pub(crate) struct Server {
    pub(crate) process: Process,
    pub(crate) address: String,
}

impl Server {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut command = skep_command("serve --listen 127.0.0.1:0");
        let mut process = Process::start(command.args(arguments));
        let address = wait_for("the server to say where it is", || {
            let said = process.stderr();
            assert!(process.is_running(), "it ended: {said}");
            let (_, rest) = said.split_once("open http://")?;
            Some(rest.split(' ').next()?.to_owned())
        });
        Self { process, address }
    }

    pub(crate) fn connect(&self) -> Connection {
        Connection::new(&self.address)
    }
}

/// One HTTP connection that is kept open.
pub(crate) struct Connection {
    stream: BufReader<TcpStream>,
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) version: Option<String>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }
}

impl Connection {
    fn new(address: &str) -> Self {
        let stream = TcpStream::connect(address).expect("connects");
        stream.set_nodelay(true).expect("a socket");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
        Self { stream: BufReader::new(stream) }
    }

    pub(crate) fn send(&mut self, method: &str, path: &str, kind: &str, body: &[u8]) -> Answer {
        let mut request = format!(
            "{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Type: {kind}\r\n\
             Content-Length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(body);
        self.stream.get_mut().write_all(&request).expect("sends");
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("answers");
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
        let (mut length, mut version) = (0, None);
        loop {
            line.clear();
            self.stream.read_line(&mut line).expect("answers");
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            match name {
                "content-length" => length = value.parse().expect("a number"),
                "skep-version" => version = Some(value.to_owned()),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).expect("a whole answer");
        Answer { status, version, body }
    }

    pub(crate) fn predict(&mut self, picture: &[u8]) -> Answer {
        self.send("POST", "/predict", "image/png", picture)
    }

    pub(crate) fn post(&mut self, path: &str, question: &Value) -> Answer {
        self.send("POST", path, "application/json", question.to_string().as_bytes())
    }
}

/// Uses the page as people do, in a real browser; `arguments` are those of `try_page.py`. Where
/// `SKEP_SCREENSHOTS` names a folder, pictures of it go there.
#[track_caller]
pub(crate) fn try_page(what: &str, server: &Server, arguments: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/try_page.py");
    let mut command = Command::new("python3");
    command.arg(script).arg(what).arg(format!("http://{}", server.address)).args(arguments);
    if let Some(folder) = std::env::var_os("SKEP_SCREENSHOTS") {
        command.arg("--screenshots").arg(folder);
    }
    let ended = run_to_end(&mut command);
    println!("{}{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code, Some(0), "the page does not work");
}
