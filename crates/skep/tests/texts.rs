//! Reviews as a person meets them on the command line: the built-in ones, one's own, mistakes.

mod support;

use std::path::Path;

use serde_json::Value;
use skep_data::Vocabulary;
use support::{Ended, run_to_end, skep_command};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn run(place: &Path, arguments: &str) -> Ended {
    run_to_end(skep_command(arguments).current_dir(place))
}

fn result(ended: &Ended) -> Value {
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    serde_json::from_str(ended.stdout.lines().last().expect("a last line")).expect("JSON")
}

/// What is needed to use a model lies beside it.
fn vocabulary(result: &Value) -> Vocabulary {
    let model = Path::new(result["model"].as_str().expect("a path"));
    let path = model.with_file_name("assets").join(Vocabulary::ASSET);
    Vocabulary::parse("it", &std::fs::read(path).expect("is kept")).expect("a vocabulary")
}

#[test]
fn both_models_learn_the_built_in_reviews() {
    let place = folder();
    let ended = run(place.path(), "train imdb --json --workers 2");
    let average = result(&ended);
    assert!(ended.stderr.contains("made up by Skep and not IMDB"), "{}", ended.stderr);
    assert_eq!(average["run"], "reviews");
    assert!(average["accuracy"].as_f64().expect("a share") > 0.9, "{average}");
    let vocabulary = vocabulary(&average);
    assert_eq!(vocabulary.classes(), ["negative", "positive"]);
    assert_eq!(vocabulary.encode("The FILM").len(), 400);

    let flags = "train reviews --model text-bigru --json --workers 2 --epochs 5 --rate 0.02 --name both \
                 --set model.settings.words=500 --set model.settings.hidden=8";
    let both = result(&run(place.path(), flags));
    assert!(both["accuracy"].as_f64().expect("a share") > 0.9, "{both}");
}

#[test]
fn the_same_seed_gives_the_same_model_of_ones_own_reviews() {
    let place = folder();
    let mut sheet = "review,sentiment\n".to_owned();
    for at in 0..60 {
        sheet
            .push_str(&format!("\"number {at}, good, fine\",positive\nnumber {at} bad,negative\n"));
    }
    std::fs::write(place.path().join("mine.csv"), sheet).expect("writes");
    let train = |name: &str| {
        let flags = "train imdb --data mine.csv --json --epochs 4 --batch 10 --workers 2 --name";
        let result = result(&run(place.path(), &format!("{flags} {name}")));
        assert_eq!(vocabulary(&result).words()[..2], ["number", "bad"]);
        assert!(result["accuracy"].as_f64().expect("a share") > 0.9, "{result}");
        std::fs::read(result["model"].as_str().expect("a path")).expect("it")
    };
    assert!(train("first") == train("second"), "the same seed gave another model");
}

#[test]
fn mistakes_are_named_and_leave_nothing() {
    let place = folder();
    std::fs::write(place.path().join("bad.csv"), "title,stars\nx,1\n").expect("writes");
    std::fs::write(place.path().join("bad.tar.gz"), [0x1f, 0x8b, 8, 0]).expect("writes");
    std::fs::create_dir(place.path().join("empty")).expect("makes");
    for (flags, parts) in [
        ("imdb --data nowhere", &["`nowhere`", "nor a folder or file"][..]),
        ("imdb --data empty", &["train/pos", ".csv"]),
        ("imdb --data bad.csv", &["bad.csv", "`title`", "sentiment"]),
        ("imdb --data bad.tar.gz", &["bad.tar.gz", "cut short"]),
        ("imdb --model lenet5", &["no model `lenet5`", "text-average, text-bigru"]),
        ("mnist --model text-bigru", &["`mnist` has no model"]),
        ("imdb --set model.settings.wrods=9", &["`wrods`", "words, length, dimension"]),
        ("mnist --set model.settings.words=9", &["`words`", "classes, form"]),
        ("imdb --data ./empty --set model.settings.length=0", &["`length`", "1 to 65536"]),
    ] {
        let ended = run(place.path(), &format!("train {flags}"));
        assert_eq!(ended.code, Some(2), "{flags}: {}", ended.stderr);
        for part in parts {
            assert!(ended.stderr.contains(part), "{flags} lacks `{part}`: {}", ended.stderr);
        }
        let runs = place.path().join("skep-runs/runs");
        assert!(std::fs::read_dir(runs).into_iter().flatten().next().is_none(), "{flags}");
    }
}
