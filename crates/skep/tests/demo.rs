//! `skep demo chaos`, short: what it shows holds, and it leaves nothing behind.

mod support;

use std::path::Path;

use serde_json::Value;
use support::{Process, run_to_end, skep_command, wait_for};

/// The processes whose parent is this one.
fn children(parent: u32) -> Vec<u32> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let ids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|id: &u32| {
        // Behind the name, which may hold anything, come state and parent.
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        rest.split_whitespace().nth(1) == Some(parent.to_string().as_str())
    })
    .collect()
}

fn is_alive(id: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).expect("a folder").next().is_none()
}

#[test]
fn kills_lose_nothing_double_nothing_and_drop_nothing() {
    let (temporary, pictures) = (tempfile::tempdir().expect("a"), tempfile::tempdir().expect("b"));
    let mut command = skep_command("demo chaos --seconds 20 --workers 4 --seed 5 --json");
    command.env("TMPDIR", temporary.path()).arg("--save").arg(pictures.path());
    let ended = run_to_end(&mut command);
    println!("{}{}", ended.stderr, ended.stdout);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let line = ended.stdout.lines().last().expect("a line");
    let result: Value = serde_json::from_str(line).expect("JSON");
    let count = |name: &str| result[name].as_u64().unwrap_or_else(|| panic!("no {name}: {result}"));
    assert!(count("kills") >= 10, "{result}");
    assert!(count("hive_kills") >= 1, "{result}");
    assert_eq!((count("lost"), count("doubled"), count("dropped")), (0, 0, 0), "{result}");
    assert_eq!(result["bits_equal"], true, "{result}");
    assert_eq!(result["model_sha256"], result["calm_model_sha256"]);
    assert_eq!(result["accuracy"], result["calm_accuracy"]);
    // The last version is measured in any case, on validation and test samples.
    assert!(count("measurements") >= 2, "{result}");
    assert!(count("requests") > 0 && count("page_versions") > 1, "{result}");
    assert!(count("memory_peak") <= count("memory_limit"), "{result}");
    let picture = std::fs::read_to_string(pictures.path().join("chaos.svg")).expect("a picture");
    assert!(picture.starts_with("<svg") && picture.contains("doubled 0; the same bits"));
    assert!(is_empty(temporary.path()), "something is left");
}

/// Called off in good order or killed itself: no process and, in the first case, no file is left.
#[test]
fn whatever_ends_it_ends_everything() {
    for signal in [libc::SIGINT, libc::SIGKILL] {
        let temporary = tempfile::tempdir().expect("a folder");
        let mut command = skep_command("demo chaos --seconds 600 --workers 3");
        let mut demo = Process::start(command.env("TMPDIR", temporary.path()));
        let company = wait_for("a hive and workers", || {
            assert!(demo.is_running(), "{}", demo.stderr());
            Some(children(demo.id())).filter(|company| company.len() >= 4)
        });
        demo.signal(signal);
        let code = demo.code();
        wait_for("the others to end", || (!company.iter().any(|&id| is_alive(id))).then_some(()));
        if signal == libc::SIGINT {
            assert_eq!(code, Some(130), "{}", demo.stderr());
            assert!(is_empty(temporary.path()), "something is left");
        }
    }
}

#[test]
fn workers_have_no_more_memory_than_they_are_given() {
    let ended = run_to_end(&mut skep_command("demo chaos --seconds 5 --workers 2 --memory 2"));
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("workers: keeps ending"), "{}", ended.stderr);
    assert!(ended.stderr.contains("a higher --memory"), "{}", ended.stderr);
}

#[test]
fn mistakes_are_refused_before_anything_starts() {
    for (arguments, part) in [
        ("--seconds 0", "--seconds"),
        ("--seconds nan", "--seconds"),
        ("--workers 1", "--workers"),
        ("--kills-per-second 0", "--kills-per-second"),
        ("--memory 0", "--memory"),
        ("--store /", "is not empty"),
    ] {
        let ended = run_to_end(&mut skep_command(&format!("demo chaos {arguments}")));
        assert_eq!(ended.code, Some(2), "{arguments}: {}", ended.stderr);
        assert!(ended.stderr.contains(part), "{arguments}: {}", ended.stderr);
    }
}
