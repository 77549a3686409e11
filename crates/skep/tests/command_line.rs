//! The command line as a person meets it: help, mistakes, results, and what each flag does.

mod support;

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use skep_wire::{Frame, Layout, Manifest, RUN_METADATA, RunSpec, ShardRef};
use support::{Ended, HiveSetup, free_port, run_to_end, skep, skep_command, wait_for};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Runs `skep` in an empty folder of its own, which must be empty afterwards but for the store's
/// own folders: a mistake leaves nothing half-written.
#[track_caller]
fn mistake(arguments: &str, code: i32, parts: &[&str]) {
    let place = folder();
    mistake_in(place.path(), arguments, code, parts);
    let runs = place.path().join("skep-runs/runs");
    let left: Vec<_> = std::fs::read_dir(&runs).into_iter().flatten().flatten().collect();
    assert!(left.is_empty(), "`{arguments}` left {left:?}");
}

#[track_caller]
fn mistake_in(place: &Path, arguments: &str, code: i32, parts: &[&str]) {
    let ended = run_to_end(skep_command(arguments).current_dir(place));
    assert_eq!(ended.code, Some(code), "`{arguments}`: {}", ended.stderr);
    assert!(ended.stdout.is_empty(), "`{arguments}` wrote to stdout: {}", ended.stdout);
    assert!(ended.stderr.contains("error: "), "`{arguments}`: {}", ended.stderr);
    for part in parts {
        assert!(ended.stderr.contains(part), "`{arguments}` lacks `{part}`: {}", ended.stderr);
    }
}

fn result(ended: &Ended) -> Value {
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    serde_json::from_str(ended.stdout.lines().last().expect("a last line")).expect("JSON")
}

/// `skep train mnist --json` with these flags in a folder.
fn train(place: &Path, flags: &str) -> Value {
    let mut command = skep_command(&format!("train mnist --json {flags}"));
    result(&run_to_end(command.current_dir(place)))
}

#[test]
fn help_says_what_there_is() {
    let ended = run_to_end(&mut skep_command("--help"));
    assert_eq!(ended.code, Some(0));
    insta::assert_snapshot!(ended.stdout, @r"
    Train a model on machines that come and go

    Usage: skep [OPTIONS] <COMMAND>

    Commands:
      train   Train here and now: a hive and one worker per core start by themselves
      hive    Keep the parameters: the server that workers come to
      worker  Work for a hive until its run is done
      run     Create, list, show, pause, resume, finish, stop or delete runs of a hive
      data    Fetch, look at, split or copy data
      model   Average, measure, look into, convert, fetch or export models
      serve   Answer questions with a trained model, over HTTP and on a page
      status  Show a hive's runs and workers: versions, staleness, throughput, time spent waiting
      watch   Watch a run until it ends: progress, loss, workers, events
      logs    Show what a run's workers said
      demo    Show what kills do to a run: nothing
      key     Make, issue and revoke keys
      help    Print this message or the help of the given subcommand(s)

    Options:
          --log <LEVEL>        What to log: error, warn, info, debug, or a filter such as
                               `info,skep_hive=debug` [env: SKEP_LOG=]
          --log-format <FORM>  How to log [default: text] [possible values: text, json]
      -h, --help               Print help
      -V, --version            Print version
    ");
    assert_eq!(run_to_end(&mut skep_command("--version")).code, Some(0));
}

#[test]
fn flags_that_cannot_be_are_refused() {
    mistake("train mnist --epoch 3", 2, &["--epoch", "--epochs"]);
    mistake("train mnist --epochs many", 2, &["many", "--epochs"]);
    mistake("train mnist --epochs 3 --steps 5", 2, &["--epochs", "--steps"]);
    mistake("train mnist --policy ring:4", 2, &["ring:4", "hint: such as batch:4"]);
    mistake("train mnist --policy batch:0", 2, &["policy.size", "1 or more"]);
    mistake("train mnist --policy sync:4,size=3", 2, &["policy.size", "`sync`"]);
    mistake("train mnist --optimiser adagrad", 2, &["adagrad", "adam"]);
    mistake("train mnist --workers 0", 2, &["--workers", "1 or more"]);
    mistake("train mnist --name A/B", 2, &["A/B", "name"]);
    mistake("train mnist --set train.bath=3", 2, &["bath", "batch"]);
    mistake("train mnist --set batch", 2, &["KEY=VALUE"]);
    mistake("train mnist --until-accuracy 98", 2, &["stop.accuracy", "0 to 1"]);
    mistake("train cifar", 2, &["`cifar`", "mnist"]);
    mistake("train --resume nothing", 2, &["`nothing`"]);
}

#[test]
fn job_files_that_cannot_be_are_refused() {
    let place = folder();
    for (text, parts) in [
        ("[run\nepochs = 3", &["job.toml", "line 1"][..]),
        ("[train]\nbath = 3", &["job.toml", "bath", "batch"]),
        ("[train]\nbatch = \"many\"", &["job.toml", "many"]),
        ("[model]\nkind = \"resnet\"", &["`resnet`", "lenet5"]),
        ("[policy]\nkind = \"batch\"\nslots = 3", &["policy.slots", "`batch`"]),
    ] {
        std::fs::write(place.path().join("job.toml"), text).expect("writes");
        mistake_in(place.path(), "train job.toml", 2, parts);
        assert!(!place.path().join("skep-runs/runs").exists(), "{text}");
    }
    mistake("train nowhere.toml", 2, &["nowhere.toml"]);
}

/// An idx file of zeros.
fn idx(shape: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, shape.len() as u8];
    bytes.extend(shape.iter().flat_map(|side| side.to_be_bytes()));
    bytes.resize(bytes.len() + shape.iter().product::<u32>() as usize, 0);
    bytes
}

fn write_idx(folder: &Path, height: u32) {
    for (name, count) in [("train", 40), ("t10k", 10)] {
        let images = idx(&[count, height, 28]);
        std::fs::write(folder.join(format!("{name}-images-idx3-ubyte")), images).expect("writes");
        std::fs::write(folder.join(format!("{name}-labels-idx1-ubyte")), idx(&[count]))
            .expect("writes");
    }
}

#[test]
fn data_that_cannot_be_is_refused() {
    mistake("train mnist --data nowhere", 2, &["nowhere"]);
    mistake("train mnist --data .", 2, &["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]);
    let data = folder();
    let flag = format!("train mnist --data {}", data.path().display());
    write_idx(data.path(), 28);
    let images = data.path().join("train-images-idx3-ubyte");
    let whole = std::fs::read(&images).expect("reads");
    std::fs::write(&images, &whole[..1000]).expect("writes");
    mistake(&flag, 2, &["train-images-idx3-ubyte"]);
    write_idx(data.path(), 20);
    mistake(&flag, 2, &["[20, 28]", "28"]);
}

#[test]
fn places_that_cannot_be_are_refused() {
    let port = free_port();
    for command in ["status", "run list", "run show x", "logs x"] {
        let (first, rest) = command.split_once(' ').unwrap_or((command, ""));
        let arguments = format!("{first} --hive http://127.0.0.1:{port} {rest}");
        mistake(&arguments, 1, &["cannot reach the hive", "hint: ", "--hive"]);
    }
    let worker = format!("worker --patience 0 --hive http://127.0.0.1:{port}");
    mistake(&worker, 1, &["cannot reach the hive"]);
    mistake("status --hive nonsense", 2, &["`nonsense`", "http://127.0.0.1:29500"]);
    let taken = TcpListener::bind("127.0.0.1:0").expect("binds");
    let address = taken.local_addr().expect("an address");
    mistake(&format!("hive --listen {address}"), 2, &["in use", "hint: ", "--listen"]);
    mistake("hive --listen 0.0.0.0:0", 2, &["not loopback", "--insecure"]);
    // Root may write everywhere but where nothing can be.
    let place = folder();
    std::fs::write(place.path().join("file"), "x").expect("writes");
    mistake_in(place.path(), "train mnist --store file", 2, &["`file`", "folder"]);
    mistake_in(place.path(), "train mnist --store file/below", 2, &["file/below"]);
    mistake("train mnist --store /proc/skep", 2, &["/proc/skep"]);
    mistake("train mnist --store s3://bucket/x", 2, &["s3://"]);
}

#[test]
fn files_to_start_from_that_cannot_be_are_refused() {
    let place = folder();
    std::fs::write(place.path().join("job.toml"), "[run]\n").expect("writes");
    mistake_in(place.path(), "train mnist --init nowhere.safetensors", 2, &["nowhere.safetensors"]);
    mistake_in(place.path(), "train mnist --init job.toml", 2, &["job.toml", "safetensors"]);
    train(place.path(), "--steps 1 --name small");
    let other = place.path().join("skep-runs/shards");
    let shard = std::fs::read_dir(other).expect("shards").flatten().next().expect("a shard").path();
    let init = format!("train mnist --init {}", shard.display());
    mistake_in(place.path(), &init, 2, &["conv1.weight", "missing"]);
}

#[test]
fn a_result_is_one_line_of_json_and_stderr_is_plain() {
    let place = folder();
    let mut command = skep_command("train mnist --json --epochs 1 --workers 2 --seed 3");
    let ended = run_to_end(command.current_dir(place.path()));
    let first = result(&ended);
    assert!(!ended.stderr.contains('\u{1b}') && !ended.stderr.contains('\r'), "{}", ended.stderr);
    assert_eq!(first["run"], "mnist");
    assert_eq!(first["state"], "done");
    for name in ["samples", "loss", "accuracy", "seconds"] {
        assert!(first[name].is_number(), "{name}: {first}");
    }
    assert!(first["version"].is_string(), "{first}");
    let model = first["model"].as_str().expect("a path");
    let accuracy = first["accuracy"].as_f64().expect("a share");
    assert!(Path::new(model).is_file());
    assert!(accuracy > 0.85, "{accuracy}");
    // Starts where the first one ended, under the next name.
    let second = train(place.path(), &format!("--init {model} --steps 1 --seed 9"));
    assert_eq!(second["run"], "mnist-2");
    let warm = second["accuracy"].as_f64().expect("a share");
    assert!(warm > accuracy - 0.05, "{warm} after {accuracy}");
}

#[test]
fn flags_do_what_they_say() {
    let place = folder();
    let cold = train(place.path(), "--steps 3 --workers 1 --batch 16 --policy batch:1");
    assert_eq!((&cold["version"], &cold["samples"]), (&"1.3".into(), &48.into()));
    assert!(cold["accuracy"].as_f64().expect("a share") < 0.7, "{cold}");
    let model = |view: &Value| std::fs::read(view["model"].as_str().expect("a path")).expect("it");
    let again = "--steps 3 --workers 1 --batch 16 --policy batch:1";
    let same = train(place.path(), again);
    assert!(model(&cold) == model(&same), "the same seed gave another model");
    let other = train(place.path(), &format!("{again} --seed 1"));
    assert!(model(&cold) != model(&other), "another seed gave the same model");
    let every = train(place.path(), "--steps 2 --batch 8 --every 3 --policy batch:2");
    assert_eq!(every["samples"], 2 * 2 * 8 * 3);
}

#[test]
fn runs_end_when_they_are_told_to() {
    let place = folder();
    let accurate = train(place.path(), "--epochs 50 --until-accuracy 0.8");
    assert!(accurate["accuracy"].as_f64().expect("a share") > 0.75, "{accurate}");
    assert!(accurate["samples"].as_u64().expect("a count") < 40 * 9500, "{accurate}");
    let job = "[run]\nepochs = 1000\n[stop]\nsteps = 7\n";
    std::fs::write(place.path().join("seven.toml"), job).expect("writes");
    let mut command = skep_command("train seven.toml --json");
    let seven = result(&run_to_end(command.current_dir(place.path())));
    assert_eq!((&seven["run"], &seven["version"]), (&"seven".into(), &"2.7".into()));
    let short = train(place.path(), "--epochs 1000 --minutes 0.03");
    assert!(short["seconds"].as_f64().expect("a time") < 60.0, "{short}");
}

/// Long before each of its slices has failed five times, and without a result.
#[test]
fn a_run_that_diverges_ends_early_and_says_so() {
    for policy in ["sync:2", "batch:2", "async"] {
        let place = folder();
        let start = Instant::now();
        let flags = "train mnist --json --epochs 1000 --rate 1e30 --policy";
        let mut command = skep_command(&format!("{flags} {policy}"));
        let ended = run_to_end(command.current_dir(place.path()));
        assert_eq!(ended.code, Some(1), "{policy}: {}", ended.stderr);
        assert!(ended.stdout.is_empty(), "{policy}: {}", ended.stdout);
        for part in ["error: the run failed: 20 slices in a row", "the loss is NaN", "hint: "] {
            assert!(ended.stderr.contains(part), "{policy} lacks `{part}`: {}", ended.stderr);
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{policy}: {:?}", start.elapsed());
        let mut again = skep_command("train --resume mnist");
        let again = run_to_end(again.current_dir(place.path()));
        assert_eq!((again.code, again.stdout.as_str()), (Some(1), ""), "{}", again.stderr);
    }
}

/// `skep` against a hive.
fn ask(setup: &HiveSetup, arguments: &str) -> Ended {
    run_to_end(skep_command(arguments).env("SKEP_HIVE", setup.url()))
}

/// A run like another one, whose data the hive does not keep: a worker of this program says so.
fn not_for_this_program(setup: &HiveSetup, like: &str) {
    let watch = setup.watch();
    let view = watch.run(like);
    let manifest =
        Manifest { train: vec![ShardRef::named("attic/digits", 9)], ..Manifest::default() };
    let (name, made_by) = ("elsewhere".to_owned(), String::new());
    let spec = RunSpec { name, job: view.job, schema: view.schema, manifest, made_by };
    let text = serde_json::to_string(&spec).expect("JSON");
    let tensors = spec.schema.tensors().iter();
    let tensors = tensors.map(|it| (it.name.clone(), it.dtype, it.shape.clone())).collect();
    let metadata = [(RUN_METADATA.to_owned(), text)].into();
    let layout = Layout::with_metadata(tensors, Some(metadata)).expect("a layout");
    let file = Frame::zeros(Arc::new(layout)).as_bytes().to_vec();
    watch.ask(watch.client.create_run(file.into())).expect("is created");
    let ended = ask(setup, "worker --run elsewhere");
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("`attic/digits`") && ended.stderr.contains("hint: "));
    assert!(ask(setup, "run show elsewhere").stdout.contains("attic/digits"));
}

#[test]
fn runs_of_a_hive_are_managed_from_the_command_line() {
    let place = folder();
    let setup = HiveSetup::new(&skep(), place.path(), "");
    let _hive = setup.start();
    assert!(ask(&setup, "status").stdout.contains("no runs"));
    let created = ask(&setup, "run create mnist --steps 0 --name digits");
    assert_eq!((created.code, created.stdout.trim()), (Some(0), "digits"), "{}", created.stderr);
    let twice = ask(&setup, "run create mnist --name digits");
    assert_eq!(twice.code, Some(2));
    assert!(twice.stderr.contains("there is a run `digits`"), "{}", twice.stderr);
    let _worker = {
        let mut command = Command::new(skep());
        command.args(["worker", "--run", "digits", "--name", "ant", "--hive", &setup.url()]);
        support::Process::start(&mut command)
    };
    let show = |run: &str| -> Value {
        let ended = ask(&setup, &format!("run show {run}"));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        serde_json::from_str(&ended.stdout).expect("JSON")
    };
    let samples = |view: &Value| view["samples"].as_u64().expect("a count");
    wait_for("work", || (samples(&show("digits")) > 0).then_some(()));
    let list = ask(&setup, "run list").stdout;
    assert!(list.contains("digits") && list.contains("running"), "{list}");
    let listed: Value = serde_json::from_str(&ask(&setup, "run list --json").stdout).expect("JSON");
    assert_eq!(listed[0]["name"], "digits");
    let status = ask(&setup, "status").stdout;
    assert!(status.contains("digits: running") && status.contains("ant"), "{status}");
    assert!(ask(&setup, "pause").code == Some(2), "there is no such command");
    assert!(ask(&setup, "run pause digits").stdout.contains("digits: paused"));
    assert_eq!(show("digits")["state"], "paused");
    let before = samples(&wait_for("rest", || {
        let (first, second) = (show("digits"), show("digits"));
        (first["version"] == second["version"]).then_some(second)
    }));
    assert!(ask(&setup, "run resume digits").stdout.contains("digits: running"));
    wait_for("work", || (samples(&show("digits")) > before).then_some(()));
    assert_eq!(ask(&setup, "run finish digits").code, Some(0));
    let done = wait_for("the end", || Some(show("digits")).filter(|view| view["state"] == "done"));
    assert!(done["test"]["accuracy"].is_number(), "{done}");
    let logs = wait_for("the worker's words", || {
        Some(ask(&setup, "logs digits").stdout).filter(|text| text.contains("the run has ended"))
    });
    assert!(logs.contains("ant  joined at version 1.0"), "{logs}");
    not_for_this_program(&setup, "digits");
    assert_eq!(ask(&setup, "run create mnist --steps 0 --name other").code, Some(0));
    assert!(ask(&setup, "run stop other").stdout.contains("other: stopped"));
    let again = ask(&setup, "run resume other");
    assert_eq!(again.code, Some(2), "{}", again.stdout);
    assert!(again.stderr.contains("ended") || again.stderr.contains("stopped"), "{}", again.stderr);
    assert!(ask(&setup, "run delete digits").stdout.contains("digits: deleted"));
    let gone = ask(&setup, "run show digits");
    assert_eq!(gone.code, Some(2));
    assert!(gone.stderr.contains("no run `digits`") && gone.stderr.contains("hint: "));
    assert!(!place.path().join("runs/digits").exists());
}
