//! Nobody in without a key: every route, every kind of key, and what a wire must not show.

mod support;

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use skep_data::shard_hash;
use skep_hive::openapi_document;
use skep_wire::{ErrorCode, KeyIssued};
use skep_worker::{Client, ClientError, ClientSettings};
use support::{ADMIN, RunSetup, Settings, TestHive, files, rest, shard};

fn with_keys() -> Settings {
    Settings { keys: true, ..Settings::default() }
}

/// What a route needs; `None` for everyone. A route that is not here fails the tests.
fn needed(method: &str, path: &str) -> Option<&'static str> {
    match (method, path) {
        // The page is the same for everyone; what it shows it asks for, with a key.
        ("get", "/" | "/healthz" | "/readyz" | "/openapi.json") => None,
        ("get", "/metrics" | "/v1/runs" | "/v1/runs/{run}") => Some("reader"),
        ("get", "/v1/runs/{run}/parameters" | "/v1/runs/{run}/events" | "/v1/runs/{run}/logs") => {
            Some("reader")
        }
        ("get", "/v1/runs/{run}/history" | "/v1/runs/{run}/progress") => Some("reader"),
        ("get", "/v1/runs/{run}/shards/{shard}") => Some("worker"),
        (
            "post",
            "/v1/runs/{run}/leases" | "/v1/runs/{run}/contributions" | "/v1/runs/{run}/logs",
        ) => Some("worker"),
        ("put" | "delete", "/v1/runs/{run}/leases/{lease}") => Some("worker"),
        ("post", "/v1/runs" | "/v1/keys") => Some("admin"),
        ("patch" | "delete", "/v1/runs/{run}") => Some("admin"),
        ("put", "/v1/shards/{shard}") | ("delete", "/v1/keys/{key}") => Some("admin"),
        _ => panic!("say here who may {method} {path}"),
    }
}

fn rank(role: &str) -> usize {
    ["reader", "worker", "admin"].iter().position(|known| *known == role).expect("a role")
}

/// Every route of the document: method, path as written there, path to ask for. The run is deleted
/// last.
fn routes() -> Vec<(Method, String, String)> {
    let document = serde_json::to_value(openapi_document()).expect("JSON");
    let mut routes = Vec::new();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for method in methods.as_object().expect("methods").keys() {
            let asked = path
                .replace("{run}", "bees")
                .replace("{shard}", &shard_hash(&shard(40)))
                .replace("{lease}", &"a".repeat(32))
                .replace("{key}", "0123456789ab");
            let method = method.to_uppercase().parse().expect("a method");
            routes.push((method, path.clone(), asked));
        }
    }
    routes.sort_by_key(|(method, path, _)| method == Method::DELETE && path == "/v1/runs/{run}");
    routes
}

async fn issue(hive: &TestHive, request: Value) -> KeyIssued {
    hive.post("/v1/keys").key(ADMIN).json(&request).ok().await.json()
}

async fn bees_and_wasps(settings: Settings) -> TestHive {
    let hive = TestHive::start(settings).await;
    hive.create(&RunSetup::new("bees", 4)).await;
    hive.create(&RunSetup::new("wasps", 4)).await;
    hive
}

#[test]
fn the_document_has_every_route_of_the_router() {
    let source = include_str!("../src/routes.rs");
    let document = serde_json::to_value(openapi_document()).expect("JSON");
    let mut count = 0;
    for line in source.lines().filter_map(|line| line.trim().strip_prefix(".route(\"")) {
        let (path, handlers) = line.split_once("\", ").expect("a path and handlers");
        let methods = document["paths"][path].as_object().unwrap_or_else(|| panic!("no {path}"));
        let handled = ["get(", "post(", "put(", "patch(", "delete("];
        let handled = handled.iter().filter(|method| handlers.contains(*method)).count();
        assert_eq!(handled, methods.len(), "{path}: {methods:?}");
        count += 1;
    }
    assert_eq!(count, document["paths"].as_object().expect("paths").len());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_wants_the_right_key() {
    let hive = bees_and_wasps(with_keys()).await;
    let mut keys = Vec::new();
    for role in ["reader", "worker", "admin"] {
        for run in [None, Some("bees"), Some("wasps")] {
            let key = issue(&hive, json!({ "role": role, "run": run })).await.key;
            keys.push((role, run, key));
        }
    }
    let expired = issue(&hive, json!({ "role": "admin", "seconds": 0.0 })).await.key;
    for (method, path, asked) in routes() {
        let call = || hive.call(method.clone(), &asked);
        let Some(role) = needed(&method.as_str().to_lowercase(), &path) else {
            assert!(call().head().await.status().is_success(), "{method} {asked} is for everyone");
            continue;
        };
        call().refused(ErrorCode::Unauthorised).await;
        call().key("skep_0123456789ab_unknown").refused(ErrorCode::Unauthorised).await;
        call().key("").refused(ErrorCode::Unauthorised).await;
        call().header("authorization", "Basic eDp5").refused(ErrorCode::Unauthorised).await;
        call().key(&expired).refused(ErrorCode::Unauthorised).await;
        let of_run = path.starts_with("/v1/runs/{run}");
        for (own, run, key) in &keys {
            let this_run = run.is_none() || (of_run && *run == Some("bees"));
            if rank(own) < rank(role) || !this_run {
                let error = call().key(key).refused(ErrorCode::Forbidden).await;
                assert!(!error.message.contains(key.as_str()), "{error:?}");
            }
        }
        let allowed = |(own, run, _): &&(&str, Option<&str>, String)| {
            rank(own) >= rank(role) && (run.is_none() || (of_run && *run == Some("bees")))
        };
        for (own, run, key) in keys.iter().filter(allowed) {
            let status = call().key(key).head().await.status().as_u16();
            assert!(
                ![401, 403].contains(&status),
                "{method} {asked} as {own} of {run:?}: {status}"
            );
        }
    }
    // What is no route shows nothing either.
    hive.get("/v1/secrets").refused(ErrorCode::Unauthorised).await;
    hive.get("/v1/secrets").key(ADMIN).refused(ErrorCode::NotFound).await;
    hive.call(Method::PUT, "/v1/runs").refused(ErrorCode::Unauthorised).await;
    hive.call(Method::PUT, "/v1/runs").key(ADMIN).refused(ErrorCode::BadRequest).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_name_of_a_run_cannot_be_disguised() {
    let hive = bees_and_wasps(with_keys()).await;
    let key = issue(&hive, json!({ "role": "worker", "run": "bees" })).await.key;
    hive.get("/v1/runs/bees").key(&key).ok().await;
    for path in [
        "/v1/runs/wasp%73",
        "/v1/runs/bees%2f..%2fwasps",
        "/v1/runs//wasps",
        "/v1/runs/bees/../wasps",
    ] {
        let status = hive.get(path).key(&key).send().await.status;
        assert!([403, 404].contains(&status), "{path}: {status}");
    }
    let error = hive.get("/v1/runs/%ff").key(ADMIN).refused(ErrorCode::BadRequest).await;
    assert!(!error.message.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_key_is_refused_now_and_after_a_restart() {
    let hive = bees_and_wasps(with_keys()).await;
    let kept = issue(&hive, json!({ "role": "reader" })).await;
    let taken = issue(&hive, json!({ "role": "reader" })).await;
    hive.get("/v1/runs").key(&taken.key).ok().await;
    let revoke =
        |hive: &TestHive, id: &str| hive.call(Method::DELETE, &format!("/v1/keys/{id}")).key(ADMIN);
    revoke(&hive, &taken.id).ok().await;
    hive.get("/v1/runs").key(&taken.key).refused(ErrorCode::Unauthorised).await;
    revoke(&hive, &taken.id).refused(ErrorCode::NotFound).await;
    // The admin key is the hive's own: revoking it would lock everyone out.
    revoke(&hive, "admin").refused(ErrorCode::NotFound).await;
    hive.get("/v1/runs").key(ADMIN).ok().await;
    let hive = hive.restart().await;
    hive.get("/v1/runs").key(&taken.key).refused(ErrorCode::Unauthorised).await;
    hive.get("/v1/runs").key(&kept.key).ok().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_for_runs_that_exist_and_roles_that_are_known() {
    let hive = bees_and_wasps(with_keys()).await;
    let create = |request: Value| hive.post("/v1/keys").key(ADMIN).json(&request);
    create(json!({ "role": "worker", "run": "hornets" })).refused(ErrorCode::NotFound).await;
    create(json!({ "role": "queen" })).refused(ErrorCode::BadRequest).await;
    create(json!({ "role": "worker", "for": "ever" })).refused(ErrorCode::BadRequest).await;
    create(json!([])).refused(ErrorCode::BadRequest).await;
    // Less than nothing is over at once; more than a lifetime does not overflow.
    let past = issue(&hive, json!({ "role": "reader", "seconds": -5.0 })).await;
    hive.get("/v1/runs").key(&past.key).refused(ErrorCode::Unauthorised).await;
    let long = issue(&hive, json!({ "role": "reader", "seconds": 1e300 })).await;
    hive.get("/v1/runs").key(&long.key).ok().await;
}

/// Everything that was logged in this process.
fn log() -> &'static Mutex<Vec<u8>> {
    static LOG: OnceLock<Mutex<Vec<u8>>> = OnceLock::new();
    LOG.get_or_init(Mutex::default)
}

struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        log().lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_in_no_log_and_in_no_file() {
    let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE);
    subscriber.with_writer(|| Log).with_ansi(false).init();
    let hive = bees_and_wasps(with_keys()).await;
    let worker = issue(&hive, json!({ "role": "worker", "run": "bees" })).await;
    let strange = "skep_0123456789ab_strange";
    for key in [&worker.key, ADMIN, strange] {
        hive.get("/v1/runs").key(key).send().await;
        hive.get("/v1/runs/bees").key(key).send().await;
        hive.post("/v1/runs/bees/leases").key(key).json(&json!({ "worker": "bee" })).send().await;
        hive.post("/v1/keys").key(key).body("no JSON").send().await;
    }
    let hive = hive.restart().await;
    hive.get("/v1/runs/bees").key(&worker.key).ok().await;
    let found = files(hive.folder.path());
    assert!(found.iter().any(|path| path.ends_with(format!("{}.json", worker.id))), "{found:?}");
    for path in found {
        let text = String::from_utf8_lossy(&std::fs::read(&path).expect("a file")).into_owned();
        for key in [&worker.key, ADMIN] {
            assert!(!text.contains(key), "a key is in {}", path.display());
        }
    }
    let log = String::from_utf8_lossy(&log().lock().expect("no panic")).into_owned();
    assert!(log.contains("joined"), "the log was looked at: {log}");
    for key in [&worker.key, ADMIN, strange] {
        assert!(!log.contains(key), "a key is in the log");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_other_sites_are_refused() {
    let hive = bees_and_wasps(Settings::default()).await;
    let host = hive.address.to_string();
    let pause = |origin: &str| {
        let call = hive.call(Method::PATCH, "/v1/runs/bees").json(&json!({ "action": "pause" }));
        call.header("origin", origin)
    };
    for origin in ["https://evil.example", "null", "http://127.0.0.1", "http://evil@127.0.0.1"] {
        pause(origin).refused(ErrorCode::Forbidden).await;
    }
    pause(&format!("http://{host}")).ok().await;
}

fn client(hive: &TestHive, pin: Option<&str>, authority: Option<PathBuf>) -> Client {
    Client::new(ClientSettings {
        url: format!("https://{}", hive.address),
        key: None,
        pin: pin.map(str::to_owned),
        authority,
        patience: Duration::ZERO,
        stop: Arc::default(),
    })
    .expect("good settings")
}

fn with_tls() -> Settings {
    Settings { tls: true, ..Settings::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pin_and_an_authority_let_the_right_hive_in_and_no_other() {
    let hive = bees_and_wasps(with_tls()).await;
    let other = bees_and_wasps(with_tls()).await;
    let (own, others) = (hive.fingerprint.clone(), other.fingerprint.clone());
    assert_ne!(own, others);
    let runs = client(&hive, own.as_deref(), None).runs().await.expect("the right pin");
    assert_eq!(runs.len(), 2);
    let refused = client(&hive, others.as_deref(), None).runs().await.expect_err("the wrong pin");
    assert!(matches!(refused, ClientError::Unreachable { .. }), "{refused}");
    assert!(refused.to_string().contains("not the pinned one"), "{refused}");
    client(&hive, None, None).runs().await.expect_err("nobody vouches for it");

    let certificate = |hive: &TestHive| Some(hive.folder.path().join("tls/hive.crt"));
    client(&hive, None, certificate(&hive)).runs().await.expect("its own certificate");
    client(&hive, None, certificate(&other)).runs().await.expect_err("another's certificate");

    let hive = hive.restart().await;
    assert_eq!(hive.fingerprint, own, "the certificate is kept");
    client(&hive, own.as_deref(), None).runs().await.expect("the pin still holds");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tls_port_does_not_speak_plain_http() {
    let hive = bees_and_wasps(with_tls()).await;
    let mut stream = hive.raw(b"GET /healthz HTTP/1.1\r\nHost: hive\r\n\r\n").await;
    let answer = rest(&mut stream).await;
    assert!(answer.len() < 64, "an alert at most: {answer:?}");
    assert!(!answer.windows(4).any(|window| window == b"HTTP"), "{answer:?}");
}

#[test]
fn a_private_key_is_for_its_owner_alone() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a folder");
    let names = ["localhost".to_owned()];
    let made = skep_hive::TlsIdentity::auto(folder.path(), &names).expect("makes one");
    let mode =
        std::fs::metadata(folder.path().join("hive.key")).expect("a key").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let again = skep_hive::TlsIdentity::auto(folder.path(), &names).expect("finds it");
    assert_eq!(made.fingerprint(), again.fingerprint());
}

#[test]
fn the_document_is_sound() {
    let document = serde_json::to_value(openapi_document()).expect("JSON");
    assert!(document["openapi"].as_str().expect("a version").starts_with("3."));
    assert!(document["info"]["title"].is_string() && document["info"]["version"].is_string());
    let mut ids = std::collections::BTreeSet::new();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for (method, operation) in methods.as_object().expect("methods") {
            let responses = operation["responses"].as_object().expect("responses");
            assert!(!responses.is_empty(), "{method} {path} has no responses");
            for (status, response) in responses {
                assert!(status.parse::<u16>().is_ok(), "{method} {path}: {status}");
                assert!(response["description"].is_string(), "{method} {path}: {status}");
            }
            let id = operation["operationId"].as_str().expect("an id");
            assert!(ids.insert(id.to_owned()), "{id} is there twice");
            let parameters = operation["parameters"].as_array().cloned().unwrap_or_default();
            for name in path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
            {
                let found = parameters.iter().any(|one| one["name"] == name && one["in"] == "path");
                assert!(found, "{method} {path} does not describe {name}");
            }
        }
    }
    let mut unresolved = Vec::new();
    references(&document, &mut |reference| {
        let pointer = reference.strip_prefix('#').expect("a reference within");
        if document.pointer(pointer).is_none() {
            unresolved.push(reference.to_owned());
        }
    });
    assert!(unresolved.is_empty(), "{unresolved:?}");
}

fn references(value: &Value, found: &mut dyn FnMut(&str)) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get("$ref") {
                found(reference);
            }
            fields.values().for_each(|value| references(value, found));
        }
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        _ => {}
    }
}
