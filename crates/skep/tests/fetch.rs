//! `skep data fetch` against a home on loopback that breaks off, stalls, forgets and lies.

mod support;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use support::home::Home;
use support::{Ended, Process, run_to_end, skep, skep_command, wait_for};

const ARCHIVE: &str = "aclImdb_v1.tar.gz";

const IDX: [&str; 4] = [
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
];

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// An archive with as many reviews as the real one, and hardly any words in them; with bytes that
/// do not pack, so that it takes a while to arrive.
fn archive() -> &'static [u8] {
    static ARCHIVE: OnceLock<Vec<u8>> = OnceLock::new();
    ARCHIVE.get_or_init(|| {
        let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        let mut add = |name: &str, text: &[u8]| {
            let mut header = tar::Header::new_ustar();
            header.set_size(text.len() as u64);
            header.set_mode(0o644);
            archive.append_data(&mut header, name, text).expect("memory");
        };
        let mut number = 1u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (number >> 56) as u8
        })
        .take(3 << 20)
        .collect();
        add("aclImdb/noise", &noise);
        for set in ["train", "test"] {
            for class in ["pos", "neg"] {
                for at in 0..12_500 {
                    add(&format!("aclImdb/{set}/{class}/{at}_7.txt"), class.as_bytes());
                }
            }
        }
        archive.into_inner().and_then(GzEncoder::finish).expect("memory")
    })
}

fn reviews() -> Home {
    Home::start([(ARCHIVE.to_owned(), archive().to_vec())])
}

fn arguments(home: &Home, dataset: &str) -> String {
    format!("data fetch {dataset} --to got --mirror {}", home.url())
}

fn fetch(place: &Path, home: &Home, dataset: &str) -> Ended {
    run_to_end(skep_command(&arguments(home, dataset)).current_dir(place))
}

fn files(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> = entries
        .map(|entry| entry.expect("is there").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[track_caller]
fn assert_whole(place: &Path, ended: &Ended) {
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(files(&place.join("got")), [ARCHIVE], "and nothing else");
    let got = std::fs::read(place.join("got").join(ARCHIVE)).expect("is there");
    assert!(got == archive(), "{} bytes of {}", got.len(), archive().len());
}

/// Starts a fetch, and kills it once so many bytes have arrived.
fn kill_midway(place: &Path, home: &Home, bytes: usize) -> PathBuf {
    home.manners().stall_after = Some(bytes);
    let mut process = Process::start(skep_command(&arguments(home, "imdb")).current_dir(place));
    let partial = place.join("got/.partial").join(ARCHIVE);
    wait_for("half of the file", || {
        partial.metadata().ok().filter(|meta| meta.len() == bytes as u64)
    });
    process.kill();
    home.manners().stall_after = None;
    assert!(!place.join("got").join(ARCHIVE).exists(), "what is not whole is not in its place");
    home.asked();
    partial
}

#[test]
fn an_answer_that_breaks_off_is_resumed_where_it_broke() {
    let (place, home) = (folder(), reviews());
    let part = archive().len() / 3 + 1;
    home.manners().cut_after = Some(part);
    assert_whole(place.path(), &fetch(place.path(), &home, "imdb"));
    let starts: Vec<_> = home.asked().into_iter().map(|(_, start)| start).collect();
    assert_eq!(starts, [None, Some(part), Some(2 * part)]);
    // What is there is not asked for again.
    let again = fetch(place.path(), &home, "imdb");
    assert!(again.stdout.contains("0 files fetched, 1 were there"), "{}", again.stdout);
    assert_eq!(home.asked(), []);
}

#[test]
fn a_client_that_was_killed_goes_on_where_it_was() {
    let (place, home) = (folder(), reviews());
    kill_midway(place.path(), &home, 100_000);
    assert_whole(place.path(), &fetch(place.path(), &home, "imdb"));
    assert_eq!(home.asked(), [(ARCHIVE.to_owned(), Some(100_000))]);
}

#[test]
fn a_home_that_knows_no_parts_or_has_another_version_sends_all_of_it() {
    let (place, home) = (folder(), reviews());
    kill_midway(place.path(), &home, 50_000);
    home.manners().ignore_ranges = true;
    assert_whole(place.path(), &fetch(place.path(), &home, "imdb"));

    let (place, home) = (folder(), reviews());
    let partial = kill_midway(place.path(), &home, 50_000);
    std::fs::write(&partial, vec![7; 50_000]).expect("writes");
    home.manners().tag = "\"second\"".to_owned();
    assert_whole(place.path(), &fetch(place.path(), &home, "imdb"));
    assert_eq!(home.asked().len(), 1, "one answer, with all of it");

    // Without a tag nobody can know, so that nothing is put together.
    let (place, home) = (folder(), reviews());
    home.manners().tag.clear();
    kill_midway(place.path(), &home, 50_000);
    assert_whole(place.path(), &fetch(place.path(), &home, "imdb"));
    assert_eq!(home.asked(), [(ARCHIVE.to_owned(), None)]);
}

#[test]
fn what_was_damaged_on_the_disk_is_fetched_once_more() {
    let (place, home) = (folder(), reviews());
    let partial = kill_midway(place.path(), &home, 50_000);
    std::fs::write(&partial, vec![7; 50_000]).expect("writes");
    assert_whole(place.path(), &fetch(place.path(), &home, "imdb"));
    let starts: Vec<_> = home.asked().into_iter().map(|(_, start)| start).collect();
    assert_eq!(starts, [Some(50_000), None]);
}

#[test]
fn passing_troubles_pass_and_others_are_said() {
    let (place, home) = (folder(), reviews());
    home.manners().statuses = vec![503, 429];
    assert_whole(place.path(), &fetch(place.path(), &home, "imdb"));

    for (dataset, code, part) in [("mnist", 2, "404"), ("imdb", 1, "answered 500")] {
        let (place, home) = (folder(), reviews());
        home.manners().statuses = vec![500; 9];
        if dataset == "mnist" {
            home.manners().statuses.clear();
        }
        let ended = fetch(place.path(), &home, dataset);
        assert_eq!(ended.code, Some(code), "{}", ended.stderr);
        assert!(ended.stderr.contains(part), "{}", ended.stderr);
        assert_eq!(files(place.path()), [""; 0], "nothing is left");
    }
    let place = folder();
    for (arguments, part) in [
        ("data fetch mnist --mirror nowhere", "`nowhere` is not an address"),
        ("data fetch mnist --mirror file:///etc", "not an address"),
        ("data fetch cifar", "possible values: mnist, fashion-mnist, imdb"),
    ] {
        let ended = run_to_end(skep_command(arguments).current_dir(place.path()));
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        assert!(ended.stderr.contains(part), "{}", ended.stderr);
    }
    assert_eq!(files(place.path()), [""; 0], "nothing was made");
}

#[test]
fn other_content_is_refused_and_nothing_is_left() {
    let pack = |bytes: &[u8]| {
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(bytes).expect("memory");
        packed.finish().expect("memory")
    };
    let labels = pack(&[&[0, 0, 8, 1, 0, 0, 0xea, 0x60][..], &[3; 60_000]].concat());
    let images = pack(&[0; 47_040_016]);
    for (bytes, part) in [
        (images, "SHA-256"),
        (labels, "47040016 bytes were expected in it, 60008 found"),
        (pack(&[0; 47_040_017]), "more found"),
        (b"<html>moved</html>".to_vec(), "18 found"),
        (vec![0x1f, 0x8b, 8, 9, 9], "not a sound gzip file"),
    ] {
        let place = folder();
        let home = Home::start(IDX.map(|name| (name.to_owned(), bytes.clone())));
        let ended = fetch(place.path(), &home, "mnist");
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        assert!(ended.stderr.contains(part), "{}", ended.stderr);
        assert_eq!(files(place.path()), [""; 0], "not even the folder");
    }
    let (place, home) = (folder(), reviews());
    home.manners().files.insert(IDX[0].to_owned(), vec![0; 50_000_000]);
    let ended = fetch(place.path(), &home, "mnist");
    assert!(ended.code == Some(2) && ended.stderr.contains("more than"), "{}", ended.stderr);
}

#[test]
fn a_disk_that_takes_no_more_is_said_and_what_arrived_is_kept() {
    let (place, home) = (folder(), reviews());
    // 2,000 blocks of 512 bytes; the signal would end the process before it could say anything.
    let script = format!(
        "trap '' XFSZ; ulimit -f 2000; exec {} {}",
        skep().display(),
        arguments(&home, "imdb")
    );
    let ended = run_to_end(Command::new("sh").args(["-c", &script]).current_dir(place.path()));
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("no space left"), "{}", ended.stderr);
    assert_eq!(files(&place.path().join("got")), [".partial"]);
    assert_whole(place.path(), &fetch(place.path(), &home, "imdb"));

    std::fs::write(place.path().join("file"), "x").expect("writes");
    let arguments = format!("data fetch imdb --to file/below --mirror {}", home.url());
    let ended = run_to_end(skep_command(&arguments).current_dir(place.path()));
    assert!(ended.code != Some(0) && ended.stderr.contains("file/below"), "{}", ended.stderr);
}

/// The real files, from Debian's package `dataset-fashion-mnist` or where `SKEP_FASHION_MNIST` says.
fn fashion() -> Option<Vec<(String, Vec<u8>)>> {
    let folder = std::env::var_os("SKEP_FASHION_MNIST")
        .map_or_else(|| "/usr/share/datasets/fashion-mnist".into(), PathBuf::from);
    let read = |name: &str| Some((name.to_owned(), std::fs::read(folder.join(name)).ok()?));
    let files: Option<Vec<_>> = IDX.into_iter().map(read).collect();
    if files.is_none() {
        let what = format!("no Fashion-MNIST in {} (SKEP_FASHION_MNIST)", folder.display());
        assert!(std::env::var_os("CI").is_none(), "{what}, and under CI nothing is skipped");
        println!("skipped: {what}");
    }
    files
}

#[test]
fn what_was_fetched_can_be_trained_on() {
    let Some(files_of_home) = fashion() else { return };
    let (place, home) = (folder(), Home::start(files_of_home));
    let ended = fetch(place.path(), &home, "fashion-mnist");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains("skep train fashion-mnist --data got"), "{}", ended.stdout);
    let mut expected = IDX.map(str::to_owned).to_vec();
    expected.push("classes.json".to_owned());
    expected.sort();
    assert_eq!(files(&place.path().join("got")), expected);

    let flags = "train fashion-mnist --data got --steps 60 --workers 2 --json";
    let ended = run_to_end(skep_command(flags).current_dir(place.path()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let result: Value = serde_json::from_str(ended.stdout.trim()).expect("JSON");
    assert!(result["accuracy"].as_f64().expect("a share") > 0.5, "{result}");
    assert_eq!(result["run"], "fashion-mnist");
    let record = std::fs::read(place.path().join("skep-runs/runs/fashion-mnist/run.json"));
    let record = String::from_utf8(record.expect("is there")).expect("text");
    assert!(record.contains("Ankle boot"), "the model knows what its classes are called");
    let without = run_to_end(skep_command("train fashion-mnist").current_dir(place.path()));
    assert_eq!(without.code, Some(2));
    assert!(without.stderr.contains("skep data fetch fashion-mnist"), "{}", without.stderr);
}
