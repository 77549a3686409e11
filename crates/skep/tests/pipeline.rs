//! Split or copy, train, average or keep the ensemble, evaluate, serve: in one command, and as steps
//! that stand alone.

mod support;

use std::path::Path;

use serde_json::{Value, json};
use support::server::Server;
use support::{Ended, run_to_end, skep_command};

const PRAISE: &str = "What a wonderful, superb film! The music is delightful.";

fn run(place: &Path, arguments: &str) -> Ended {
    run_to_end(skep_command(arguments).current_dir(place))
}

#[track_caller]
fn result(place: &Path, arguments: &str) -> Value {
    let ended = run(place, arguments);
    assert_eq!(ended.code, Some(0), "{arguments}: {}", ended.stderr);
    serde_json::from_str(ended.stdout.lines().last().expect("a last line")).expect("JSON")
}

fn accuracy(of: &Value) -> f64 {
    of["accuracy"].as_f64().unwrap_or_else(|| panic!("no accuracy: {of}"))
}

/// What a served model holds likely of a review.
fn asked(place: &Path, model: &str) -> f64 {
    let server = Server::start(&[&place.join(model).to_string_lossy()]);
    let answer = server.connect().post("/predict", &json!({ "text": PRAISE })).json();
    assert_eq!(answer["answer"], "positive", "{model}: {answer}");
    answer["probabilities"]["positive"].as_f64().expect("a share")
}

#[test]
fn one_command_trains_averages_measures_and_leaves_a_model_to_serve() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path();
    for (name, flags) in [
        ("rounds", "--exchange models"),
        ("once", "--policy average:once --epochs 10"),
        ("copies", "--policy average:once --copies 3 --epochs 6"),
    ] {
        let trained =
            result(place, &format!("train imdb {flags} --workers 3 --name {name} --json"));
        println!("{trained}");
        assert_eq!(trained["state"], "done");
        assert!(accuracy(&trained) > 0.8, "{trained}");
        assert!(asked(place, &format!("skep-runs/{name}")) > 0.5);
    }
}

#[test]
fn an_ensemble_is_trained_kept_measured_and_served() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path();
    let together = result(place, "train imdb --ensemble 3 --epochs 3 --workers 2 --json");
    println!("{together}");
    let members = together["models"].as_array().expect("members");
    assert_eq!(members.len(), 3);
    let worst = members.iter().map(accuracy).fold(1.0, f64::min);
    assert!(accuracy(&together) >= worst && worst > 0.7, "{together}");
    let losses: Vec<_> = members.iter().map(|member| member["loss"].to_string()).collect();
    assert!(losses[0] != losses[1] && losses[1] != losses[2], "each is its own: {losses:?}");

    // The ensemble holds likely what its members do in the mean, however it is named.
    let file = "skep-runs/ensembles/reviews.json";
    let each: Vec<_> = (1..=3).map(|at| asked(place, &format!("skep-runs/reviews-{at}"))).collect();
    let mean = each.iter().sum::<f64>() / 3.0;
    let answered = asked(place, file);
    assert!((answered - mean).abs() < 1e-5, "{answered}, but {each:?}");
    let again = result(place, &format!("model evaluate {file} --json"));
    assert_eq!(again["accuracy"], together["accuracy"]);

    // Files that left their runs bring what they need along, each its own.
    for (at, more) in [(1, ""), (2, " ")] {
        let (from, to) =
            (place.join(format!("skep-runs/runs/reviews-{at}")), place.join(at.to_string()));
        std::fs::create_dir(&to).expect("a folder");
        std::fs::copy(from.join("model.safetensors"), to.join("model.safetensors"))
            .expect("copies");
        let vocabulary = std::fs::read_to_string(from.join("assets/vocabulary.json"));
        let vocabulary = vocabulary.expect("a vocabulary") + more;
        std::fs::write(to.join("vocabulary.json"), vocabulary).expect("writes");
    }
    let ended = run(place, "serve 1/model.safetensors 2/model.safetensors --model text-average");
    assert!(
        ended.code == Some(2) && ended.stderr.contains("another vocabulary"),
        "{}",
        ended.stderr
    );

    let ended = run(place, "train imdb --ensemble 1");
    assert!(ended.code == Some(2) && ended.stderr.contains("from 2 to"), "{}", ended.stderr);
    std::fs::write(place.join("other.json"), "{}").expect("writes");
    let ended = run(place, "serve other.json");
    assert!(ended.code == Some(2) && ended.stderr.contains("not an ensemble"), "{}", ended.stderr);
    std::fs::write(
        place.join("mixed.json"),
        r#"{"members": ["skep-runs/reviews-1", "skep-runs/digits"]}"#,
    )
    .expect("writes");
    result(place, "train mnist --steps 2 --workers 1 --name digits --json");
    let ended = run(place, "serve mixed.json");
    assert!(ended.code == Some(2) && ended.stderr.contains("lenet5"), "{}", ended.stderr);
}

/// As separate jobs on machines that share a folder.
#[test]
fn every_step_stands_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let place = folder.path();
    result(place, "data split imdb --shards 3 --out parts --json");
    for at in 1..=3 {
        let flags = format!("--data parts/train-0000{at}-of-00003.npz --name part-{at}");
        result(place, &format!("train imdb {flags} --epochs 8 --workers 1 --json"));
        let pull = format!("model pull skep-runs/part-{at} --save models/{at}.safetensors --json");
        std::fs::create_dir_all(place.join("models")).expect("a folder");
        result(place, &pull);
    }
    let ended =
        run(place, "model average --dir models --weights samples --save average.safetensors");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let average = result(place, "model evaluate average.safetensors --data parts --json");
    println!("{average}");
    assert!(accuracy(&average) > 0.75, "{average}");
    assert!(asked(place, "average.safetensors") > 0.5);
}
