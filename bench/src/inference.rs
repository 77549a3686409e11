//! Answers per second and how long the slowest take: `skep serve` against Flask and onnxruntime on
//! the same LeNet-5, asked by the same client over 64 connections, in turns.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::Failure;
use crate::ask::Asked;
use crate::process::{Ended, program};
use crate::rows::{Row, Target, median};

const ROUNDS: usize = 3;

/// A server, and what it answered: requests per second and the 99th percentile in milliseconds, for
/// each of the two ways of asking.
struct Server {
    name: &'static str,
    url: String,
    _process: Ended,
    measured: [Vec<(f64, f64)>; 2],
}

/// The Python that has what the peer needs, if one does.
fn python() -> Option<String> {
    let named = ["SKEP_ONNX_PYTHON", "SKEP_PYTHON"];
    let named = named.into_iter().filter_map(|name| std::env::var(name).ok());
    named.chain(["python3".to_owned()]).find(|python| {
        let packages = "import flask, gunicorn, onnx, onnxruntime, PIL";
        let check = Command::new(python).args(["-c", packages]).stderr(Stdio::null()).status();
        check.is_ok_and(|status| status.success())
    })
}

pub(crate) fn measure() -> Result<Vec<Row>, Failure> {
    let whats = ["a tensor in JSON (/v2 infer)", "a PNG file (/predict)"];
    let Some(python) = python() else {
        let why = "no Python with flask, gunicorn, onnx, onnxruntime and pillow";
        return Ok(vec![Row::skipped("answers/s against Flask + onnxruntime", why)]);
    };
    let folder = tempfile::tempdir()?;
    let (store, onnx) = (folder.path().join("store"), folder.path().join("mnist.onnx"));
    let trained = Command::new(program("skep")?)
        .args(["train", "mnist", "--epochs", "2", "--json", "--store"])
        .arg(&store)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    let parameters = store.join("runs/mnist/model.safetensors");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/flask_server.py");
    let made = Command::new(&python).args([script, "make"]).arg(&parameters).arg(&onnx).status()?;
    if !trained.success() || !made.success() {
        return Err("no model to serve".into());
    }
    let mut servers = start(&python, &store.join("mnist"), &onnx)?;
    let bodies = bodies()?;
    for round in 0..=ROUNDS {
        for server in &mut servers {
            for (at, (path, kind, body)) in bodies.iter().enumerate() {
                let url = format!("{}{path}", server.url);
                // The first round warms everybody up.
                let seconds = if round == 0 { 1.0 } else { 4.0 };
                let asked = Asked::of(&url, kind, body, seconds)?;
                if round > 0 {
                    server.measured[at].push((asked.rate, asked.slowest_percent));
                }
            }
        }
    }
    let mut rows = Vec::new();
    for (at, what) in whats.iter().enumerate() {
        let [(skep, ours), peers @ ..] = &results(&servers, at)[..] else {
            return Err("nothing was measured".into());
        };
        for (place, (name, theirs)) in peers.iter().enumerate() {
            // Flask's own server is what the target is about; others are for comparison.
            let (least, most) = match (*name, place) {
                ("Flask", _) => (Target::AtLeast(10.0), Target::AtMost(1.0)),
                _ => (Target::None, Target::None),
            };
            let text =
                |(rate, slow): &(f64, f64)| (format!("{rate:.0}/s"), format!("{slow:.1} ms"));
            let ((our_rate, our_slow), (rate, slow)) = (text(ours), text(theirs));
            let title = format!("{skep}: answers/s, {what}, 64 connections");
            rows.push(Row::new(
                &title,
                our_rate,
                format!("{name} {rate}"),
                ours.0 / theirs.0,
                least,
            ));
            let title = format!("{skep}: 99th percentile, {what}, 64 connections");
            rows.push(Row::new(
                &title,
                our_slow,
                format!("{name} {slow}"),
                ours.1 / theirs.1,
                most,
            ));
        }
    }
    Ok(rows)
}

/// The median of each server's measurements.
fn results(servers: &[Server], at: usize) -> Vec<(&'static str, (f64, f64))> {
    let middle = |server: &Server| {
        let (mut rates, mut slow): (Vec<f64>, Vec<f64>) =
            server.measured[at].iter().copied().unzip();
        (server.name, (median(&mut rates), median(&mut slow)))
    };
    servers.iter().map(middle).collect()
}

fn start(python: &str, run: &Path, onnx: &Path) -> Result<Vec<Server>, Failure> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/flask_server.py");
    let serve = |port: u16, what: &Path| -> Result<Command, Failure> {
        let mut command = Command::new(program("skep")?);
        command.arg("serve").arg(what).args(["--listen", &format!("127.0.0.1:{port}")]);
        Ok(command)
    };
    let flask = |port: u16| {
        let mut command = Command::new(python);
        command.args([script, "serve", &port.to_string()]).env("MODEL", onnx);
        command
    };
    let gunicorn = |port: u16| {
        let mut command = Command::new(python);
        command.args(["-m", "gunicorn", "--workers", "2", "--log-level", "error"]);
        command.args(["--bind", &format!("127.0.0.1:{port}"), "flask_server:app"]);
        command.env("MODEL", onnx).current_dir(env!("CARGO_MANIFEST_DIR"));
        command
    };
    let ports: Vec<u16> = (0..4).map(|_| free_port()).collect::<Result<_, _>>()?;
    let commands = [
        ("skep serve", ports[0], serve(ports[0], run)?),
        ("Flask", ports[1], flask(ports[1])),
        ("gunicorn, 2 workers", ports[2], gunicorn(ports[2])),
        ("skep serve of the ONNX file", ports[3], serve(ports[3], onnx)?),
    ];
    let mut servers = Vec::new();
    for (name, port, mut command) in commands {
        let process = Ended(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
        let start = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            if start.elapsed() > Duration::from_secs(60) {
                return Err(format!("{name} did not start").into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let url = format!("http://127.0.0.1:{port}");
        servers.push(Server { name, url, _process: process, measured: Default::default() });
    }
    Ok(servers)
}

fn free_port() -> Result<u16, Failure> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A path, a content type and a body.
type Body = (&'static str, &'static str, Vec<u8>);

/// The two ways of asking: one digit as a tensor, and the same as a PNG file.
fn bodies() -> Result<[Body; 2], Failure> {
    let test = skep_data::mnist::open("mnist")?.test;
    let image = test.column("image").ok_or("no images")?.bytes[..784].to_vec();
    let shares: Vec<f32> = image.iter().map(|&byte| f32::from(byte) / 255.0).collect();
    let tensor: Value = json!({
        "inputs": [{ "name": "image", "shape": [1, 1, 28, 28], "datatype": "FP32", "data": shares }],
        "outputs": [{ "name": "logits" }],
    });
    let mut png = std::io::Cursor::new(Vec::new());
    let grey = image::GrayImage::from_raw(28, 28, image).ok_or("not 784 bytes")?;
    grey.write_to(&mut png, image::ImageFormat::Png)?;
    Ok([
        ("/v2/models/mnist/infer", "application/json", tensor.to_string().into_bytes()),
        ("/predict", "image/png", png.into_inner()),
    ])
}
