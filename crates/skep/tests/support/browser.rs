//! A real browser without a screen, driven by `chromedriver` in WebDriver's terms.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::{Process, free_port, wait_for};

/// Whether there is one. Under CI there must be.
pub(crate) fn is_there() -> bool {
    let runs = |program: &str| {
        Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    let there = runs("chromium") && runs("chromedriver");
    if !there {
        let what = "no chromium and chromedriver (apt-get install chromium chromium-driver)";
        assert!(std::env::var_os("CI").is_none(), "{what}, and under CI nothing is skipped");
        println!("skipped: {what}");
    }
    there
}

/// A browser with one window.
pub(crate) struct Browser {
    port: u16,
    session: String,
    _driver: Process,
}

impl Browser {
    #[track_caller]
    pub(crate) fn start() -> Self {
        let port = free_port();
        let mut driver = Command::new("chromedriver");
        let driver = Process::start(driver.arg(format!("--port={port}")));
        let mut browser = Self { port, session: String::new(), _driver: driver };
        wait_for("chromedriver", || browser.try_call("GET", "/status", &Value::Null));
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1280,1100",
        ];
        let options = json!({ "args": arguments });
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": { "browser": "ALL" },
        } } });
        let session = browser.call("POST", "/session", &wanted);
        let id = session["sessionId"].as_str().unwrap_or_else(|| panic!("no session: {session}"));
        browser.session = format!("/session/{id}");
        browser
    }

    pub(crate) fn open(&self, url: &str) {
        self.command("POST", "/url", &json!({ "url": url }));
    }

    /// The value of an expression in the page.
    #[track_caller]
    pub(crate) fn value(&self, expression: &str) -> Value {
        let script = format!("return ({expression});");
        self.command("POST", "/execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// What a script hands to `done`.
    #[track_caller]
    pub(crate) fn promised(&self, script: &str) -> Value {
        self.command("POST", "/timeouts", &json!({ "script": 60_000 }));
        let script = format!("const done = arguments[0]; {script}");
        self.command("POST", "/execute/async", &json!({ "script": script, "args": [] }))
    }

    /// Waits until an expression is true.
    #[track_caller]
    pub(crate) fn until(&self, expression: &str) {
        wait_for(expression, || {
            std::thread::sleep(Duration::from_millis(50));
            (self.value(expression) == Value::Bool(true)).then_some(())
        });
    }

    /// A command of Chromium's own protocol.
    pub(crate) fn chromium(&self, command: &str, parameters: &Value) -> Value {
        let call = json!({ "cmd": command, "params": parameters });
        self.command("POST", "/goog/cdp/execute", &call)
    }

    pub(crate) fn scheme(&self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.chromium("Emulation.setEmulatedMedia", &json!({ "features": features }));
    }

    pub(crate) fn size(&self, width: u64, height: u64) {
        let size =
            json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.chromium("Emulation.setDeviceMetricsOverride", &size);
    }

    /// Writes what the window shows into a file.
    pub(crate) fn screenshot(&self, path: &Path) {
        let picture = self.command("GET", "/screenshot", &Value::Null);
        let picture = STANDARD.decode(picture.as_str().expect("base64")).expect("base64");
        std::fs::write(path, picture).expect("is written");
    }

    /// What the browser complained about: errors of scripts, what the page's policy refused.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let log = self.command("POST", "/se/log", &json!({ "type": "browser" }));
        let lines = log.as_array().into_iter().flatten();
        let severe = lines.filter(|line| line["level"] == "SEVERE");
        severe.map(|line| line["message"].to_string()).collect()
    }

    #[track_caller]
    fn command(&self, method: &str, path: &str, body: &Value) -> Value {
        self.call(method, &format!("{}{path}", self.session), body)
    }

    #[track_caller]
    fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let answer = self.try_call(method, path, body);
        let value = answer.unwrap_or_else(|| panic!("no answer to {method} {path}"));
        assert!(value.get("error").is_none(), "{method} {path}: {value}");
        value
    }

    /// One request on a connection of its own.
    fn try_call(&self, method: &str, path: &str, body: &Value) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(120))).ok()?;
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (port, length) = (self.port, body.len());
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).ok()?;
        stream.write_all(body.as_bytes()).ok()?;
        // The driver keeps connections open whatever it is told: the length says where it ends.
        let mut answer = BufReader::new(stream);
        let mut length = 0;
        loop {
            let mut line = String::new();
            answer.read_line(&mut line).ok().filter(|read| *read > 0)?;
            if line.trim().is_empty() {
                break;
            }
            if let Some(text) = line.to_lowercase().strip_prefix("content-length:") {
                length = text.trim().parse().ok()?;
            }
        }
        let mut body = vec![0; length];
        answer.read_exact(&mut body).ok()?;
        let answer: Value = serde_json::from_slice(&body).ok()?;
        Some(answer["value"].clone())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if !self.session.is_empty() {
            // So that the browser's own processes end too.
            self.try_call("DELETE", &self.session, &Value::Null);
        }
    }
}
