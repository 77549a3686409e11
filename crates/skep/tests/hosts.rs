//! A hive and a worker on hosts of their own: two network namespaces with a third one between them
//! as a router that hides the worker, as a home's or a cloud's does. The worker reaches the hive by
//! HTTPS and nothing else; nobody reaches the worker; and the hive's files are not there for it.
//!
//! Needs root, iproute2, iptables and util-linux; says so where they are not there.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::Value;

const SKEP: &str = env!("CARGO_BIN_EXE_skep");
const HIVE: &str = "10.77.1.2";
const WORKER: &str = "10.77.2.2";
const PATIENCE: Duration = Duration::from_secs(120);

/// The three hosts; gone when dropped, with their links and rules.
struct Hosts {
    hive: String,
    router: String,
    worker: String,
}

impl Hosts {
    fn new() -> Result<Self, String> {
        let id = std::process::id();
        let [hive, router, worker] =
            ["hive", "router", "worker"].map(|host| format!("skep-{host}-{id}"));
        let hosts = Self { hive, router, worker };
        let Self { hive, router, worker } = &hosts;
        for host in [hive, router, worker] {
            run(&format!("ip netns add {host}"))?;
            run(&format!("ip -n {host} link set lo up"))?;
        }
        for (host, router_side, network) in
            [(hive, "outside", "10.77.1"), (worker, "inside", "10.77.2")]
        {
            run(&format!(
                "ip -n {router} link add {router_side} type veth peer name eth0 netns {host}"
            ))?;
            run(&format!("ip -n {router} address add {network}.1/24 dev {router_side}"))?;
            run(&format!("ip -n {router} link set {router_side} up"))?;
            run(&format!("ip -n {host} address add {network}.2/24 dev eth0"))?;
            run(&format!("ip -n {host} link set eth0 up"))?;
            // Both know the way, so it is the router's rule that keeps connections out.
            run(&format!("ip -n {host} route add default via {network}.1"))?;
        }
        let exec = format!("ip netns exec {router}");
        run(&format!("{exec} sysctl -q -w net.ipv4.ip_forward=1"))?;
        run(&format!("{exec} iptables -t nat -A POSTROUTING -o outside -j MASQUERADE"))?;
        let answers = "-m conntrack --ctstate ESTABLISHED,RELATED";
        run(&format!("{exec} iptables -A FORWARD -i outside {answers} -j ACCEPT"))?;
        run(&format!("{exec} iptables -A FORWARD -i outside -j DROP"))?;
        Ok(hosts)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in [&self.hive, &self.router, &self.worker] {
            let _ = run(&format!("ip netns delete {host}"));
        }
    }
}

/// Runs a command whose words have no spaces in them.
fn run(line: &str) -> Result<(), String> {
    let mut words = line.split(' ');
    let program = words.next().unwrap_or_default();
    let output = Command::new(program).args(words).output();
    let output = output.map_err(|error| format!("{line}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{line}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// `skep` on a host, in a folder, with nothing of this process's environment but the path.
fn skep(host: &str, folder: &Path) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", host, SKEP]);
    clean(&mut command, folder);
    command
}

fn clean(command: &mut Command, folder: &Path) {
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("HOME", folder).current_dir(folder).stdin(Stdio::null());
}

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Starts a hive and waits for the line in which it says how to join: address and pin.
    fn hive(command: &mut Command) -> (Self, String, Option<String>) {
        let mut running = Self(command.stderr(Stdio::piped()).spawn().expect("starts"));
        let stderr = BufReader::new(running.0.stderr.take().expect("is piped"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                eprintln!("hive: {line}");
                let _ = sender.send(line);
            }
        });
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = lines.recv_timeout(left).expect("the hive says how to join it");
            let Some((_, flags)) = line.split_once("join with: skep worker ") else { continue };
            let flag = |name: &str| {
                let mut words = flags.split(' ').skip_while(|word| *word != name);
                words.nth(1).map(str::to_owned)
            };
            return (running, flag("--hive").expect("an address"), flag("--pin"));
        }
    }

    /// Waits for the end.
    fn end(&mut self) -> std::process::ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().expect("can be waited for") {
                return status;
            }
            assert!(Instant::now() < deadline, "still running after {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn output(command: &mut Command) -> Output {
    command.output().expect("starts")
}

fn stdout(command: &mut Command) -> String {
    let output = output(command);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_worker_behind_nat_trains_with_nothing_but_an_address_a_pin_and_a_key() {
    let tools = ["ip -V", "iptables -V", "unshare -V", "sysctl -V"];
    let hosts = tools.iter().try_for_each(|tool| run(tool)).and_then(|()| Hosts::new());
    let hosts = match hosts {
        Ok(hosts) => hosts,
        Err(reason) if std::env::var("CI").is_ok_and(|ci| ci == "true") => panic!("{reason}"),
        Err(reason) => return eprintln!("skipped: no network namespaces here: {reason}"),
    };
    let at_hive = tempfile::tempdir().expect("a folder");
    let at_worker = tempfile::tempdir().expect("a folder");
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/assets");
    let data = at_hive.path().join("data");
    std::fs::create_dir(&data).expect("a folder");
    for entry in std::fs::read_dir(assets).expect("the built-in data") {
        let entry = entry.expect("a file");
        std::fs::copy(entry.path(), data.join(entry.file_name())).expect("is copied");
    }

    let mut command = skep(&hosts.hive, at_hive.path());
    command.args(["hive", "mnist", "--data", "data", "--steps", "4", "--store", "store"]);
    command.args(["--listen", &format!("{HIVE}:0"), "--key-file", "admin.key"]);
    command.args(["--tls", "auto", "--tls-dir", "tls"]);
    let (_hive, url, pin) = Running::hive(&mut command);
    let pin = pin.expect("a certificate of its own");
    assert!(url.starts_with(&format!("https://{HIVE}:")), "{url}");
    let connect = ["--hive", &url, "--pin", &pin, "--key-file"];

    let mut issue = skep(&hosts.hive, at_hive.path());
    issue.args(["key", "create", "--role", "worker", "--run", "mnist", "--expires", "10m"]);
    let key = stdout(issue.args(connect).arg("admin.key"));
    std::fs::write(at_worker.path().join("worker.key"), key).expect("is written");

    // Something listens at the worker's, which only its own host can reach.
    let mut command = skep(&hosts.worker, at_worker.path());
    command.args(["hive", "--insecure", "--store", "decoy", "--listen", &format!("{WORKER}:0")]);
    let (_decoy, decoy, _) = Running::hive(&mut command);
    let status_of_decoy =
        |host: &str| output(skep(host, at_worker.path()).args(["status", "--hive", &decoy]));
    assert!(status_of_decoy(&hosts.worker).status.success(), "it listens");
    assert!(!status_of_decoy(&hosts.hive).status.success(), "nobody reaches the worker");

    // The hive's folder is empty as the worker sees it.
    let mut worker = Command::new("ip");
    worker.args(["netns", "exec", &hosts.worker, "unshare", "--mount", "sh", "-euc"]);
    worker.arg(r#"mount -t tmpfs none "$1"; test ! -e "$1/store"; shift; exec "$@""#);
    worker.arg("sh").arg(at_hive.path()).arg(SKEP);
    worker.args(["worker", "--run", "mnist", "--patience", "30"]).args(connect).arg("worker.key");
    clean(&mut worker, at_worker.path());
    let mut worker = Running(worker.spawn().expect("starts"));
    assert_eq!(worker.end().code(), Some(0), "the run is done");

    let mut status = skep(&hosts.hive, at_hive.path());
    let status = stdout(status.args(["status", "--json"]).args(connect).arg("admin.key"));
    let runs: Value = serde_json::from_str(&status).expect("JSON");
    assert_eq!(runs[0]["name"], "mnist");
    assert_eq!(runs[0]["state"], "done", "{status}");
    assert_eq!(runs[0]["version"], "1.4");
    assert!(runs[0]["test"]["accuracy"].is_number(), "{status}");

    // Without the key, with the wrong pin, or for more than its run: no.
    let refused = |args: &[&str]| {
        let mut command = skep(&hosts.worker, at_worker.path());
        let output = output(command.args(args));
        assert!(!output.status.success(), "{args:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let error = refused(&["run", "--hive", &url, "--pin", &pin, "show", "mnist"]);
    assert!(error.contains("key"), "{error}");
    let wrong = format!("sha256:{}", "0".repeat(64));
    let error = refused(&[
        "run",
        "--hive",
        &url,
        "--pin",
        &wrong,
        "--key-file",
        "worker.key",
        "show",
        "mnist",
    ]);
    assert!(error.contains("pinned"), "{error}");
    let error = refused(&[
        "run",
        "--hive",
        &url,
        "--pin",
        &pin,
        "--key-file",
        "worker.key",
        "stop",
        "mnist",
    ]);
    assert!(error.contains("role"), "{error}");
}
