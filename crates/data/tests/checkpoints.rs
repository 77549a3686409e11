//! A writer is killed between any two of its writes, or its disk fills up: what can be read
//! afterwards is the state before or after, never a mixture.

use std::sync::Arc;

use bytes::Bytes;
use object_store::memory::InMemory;
use serde_json::{Value, json};
use skep_data::{
    Checkpoint, DataError, Fault, Faults, RunFiles, Store, claim_generation, list_runs,
};
use skep_wire::{Dtype, Job, Manifest, Role, RunSpec, Schema, TensorSpec, Version};

fn memory() -> Store {
    Store::with(Arc::new(InMemory::new()))
}

fn spec(name: &str) -> RunSpec {
    let tensor = TensorSpec {
        name: "w".to_owned(),
        dtype: Dtype::F32,
        shape: vec![2],
        role: Role::trainable(),
    };
    RunSpec {
        name: name.to_owned(),
        job: Job::default(),
        schema: Schema::new(vec![tensor]).expect("a good schema"),
        manifest: Manifest::default(),
        made_by: "test".to_owned(),
    }
}

fn checkpoint(generation: u64, number: u64) -> Checkpoint {
    Checkpoint {
        version: Version::new(generation, number),
        model: format!("model {generation}.{number}").into(),
        optimiser: format!("optimiser {generation}.{number}").into(),
        state: json!({ "ledger": [generation, number] }),
        provenance: json!({ "job": "abc" }),
    }
}

fn files(store: &Store) -> RunFiles {
    RunFiles::new(store.clone(), "mnist").expect("a good name")
}

async fn newest(store: &Store) -> Option<Checkpoint> {
    let found = files(store).newest_checkpoint().await.expect("reads");
    assert!(found.warnings.is_empty(), "{:?}", found.warnings);
    found.checkpoint
}

/// More writes than any sequence here has.
const PREFIXES: u64 = 40;

const KILLS: [Fault; 2] = [Fault::KilledBefore, Fault::KilledAfter];

#[tokio::test]
async fn a_writer_killed_anywhere_leaves_a_whole_checkpoint() {
    for fault in KILLS {
        let mut survivors = Vec::new();
        for allowed in 0..=PREFIXES {
            let store = memory();
            files(&store).create(&spec("mnist"), "v0".into(), Value::Null).await.expect("creates");
            files(&store).write_checkpoint(&checkpoint(1, 10)).await.expect("writes");
            let faults = Faults::new(&store, fault, allowed);
            let doomed = files(&faults.store());
            let outcome = async {
                doomed.write_checkpoint(&checkpoint(1, 20)).await?;
                doomed.write_hint("latest", Version::new(1, 20)).await?;
                doomed.write_checkpoint(&checkpoint(1, 30)).await?;
                doomed.retain(1, &[]).await
            }
            .await;
            let found = newest(&store).await.expect("there always is one");
            let number = found.version.number;
            assert_eq!(found, checkpoint(1, number), "never mixed");
            survivors.push(number);
            for number in [10, 20, 30] {
                let one = files(&store).checkpoint(Version::new(1, number)).await;
                let one = one.expect("no manifest outlives its files");
                assert!(one.is_none_or(|one| one == checkpoint(1, number)));
            }
            // The next hive goes on from there and can clean up.
            let generation = claim_generation(&store, "next").await.expect("claims");
            let next = checkpoint(generation + 1, number + 1);
            files(&store).write_checkpoint(&next).await.expect("writes");
            claim_generation(&store, "one more").await.expect("claims");
            claim_generation(&store, "and more").await.expect("claims");
            files(&store).retain(1, &[]).await.expect("cleans");
            let left = store.list("runs/mnist/checkpoints").await.expect("lists");
            assert_eq!(left.len(), 3, "{left:?}");
            assert_eq!(newest(&store).await, Some(next));
            assert!(outcome.is_ok() || allowed < PREFIXES, "{outcome:?}");
            if outcome.is_ok() {
                assert_eq!(faults.writes(), allowed, "every prefix was tried");
                break;
            }
        }
        let steps = survivors.len();
        assert!(survivors.is_sorted() && steps >= 12, "{survivors:?}");
        assert!([10, 20, 30].iter().all(|number| survivors.contains(number)), "{survivors:?}");
    }
}

#[tokio::test]
async fn a_full_disk_leaves_the_former_checkpoint_and_a_retry_succeeds() {
    for allowed in 0..3 {
        let store = memory();
        files(&store).write_checkpoint(&checkpoint(1, 10)).await.expect("writes");
        let faults = Faults::new(&store, Fault::DiskFull, allowed);
        let full = files(&faults.store());
        let error = full.write_checkpoint(&checkpoint(1, 20)).await.expect_err("is full");
        assert!(matches!(error, DataError::NoSpace { .. }), "{error:?}");
        assert_eq!(newest(&store).await, Some(checkpoint(1, 10)));
        assert_eq!(full.retain(3, &[]).await.expect("deletes still work"), []);
        faults.allow(u64::MAX);
        full.write_checkpoint(&checkpoint(1, 20)).await.expect("there is room again");
        assert_eq!(newest(&store).await, Some(checkpoint(1, 20)));
    }
}

#[tokio::test]
async fn a_run_is_whole_or_not_there_whenever_its_creator_or_deleter_dies() {
    for fault in KILLS {
        for allowed in 0..=PREFIXES {
            let store = memory();
            let faults = Faults::new(&store, fault, allowed);
            let doomed = files(&faults.store());
            let outcome = async {
                doomed.create(&spec("mnist"), "old".into(), Value::Null).await?;
                doomed.write_checkpoint(&checkpoint(1, 10)).await?;
                doomed.delete().await
            }
            .await;
            let run = files(&store);
            if list_runs(&store).await.expect("lists") == ["mnist"] {
                assert_eq!(run.spec().await.expect("reads"), spec("mnist"));
                assert_eq!(run.version0().await.expect("reads"), "old");
                run.delete().await.expect("deletes");
            }
            assert!(list_runs(&store).await.expect("lists").is_empty());
            run.create(&spec("mnist"), "new".into(), json!(1)).await.expect("the name is free");
            assert_eq!(run.version0().await.expect("reads"), "new");
            assert_eq!(newest(&store).await, None, "no old checkpoint becomes the new run's");
            assert!(outcome.is_ok() || allowed < PREFIXES, "{outcome:?}");
            if outcome.is_ok() {
                assert!(allowed >= 9, "every prefix was tried: {allowed}");
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_run_is_created_once_and_says_what_it_was_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = Store::open(&folder.path().to_string_lossy()).expect("opens");
    let run = files(&store);
    assert!(matches!(run.spec().await, Err(DataError::NotFound { .. })));
    run.create(&spec("mnist"), "v0".into(), json!({ "from": "here" })).await.expect("creates");
    let again = run.create(&spec("mnist"), "other".into(), Value::Null).await;
    assert!(matches!(again, Err(DataError::Exists { .. })));
    assert_eq!(run.version0().await.expect("reads"), "v0");
    assert_eq!(run.record().await.expect("reads").extra, json!({ "from": "here" }));
    assert!(run.create(&spec("other"), Bytes::new(), Value::Null).await.is_err());
    for bad in ["", "../x", "a/b", "A", ".x"] {
        assert!(RunFiles::new(store.clone(), bad).is_err(), "{bad:?} was taken");
    }

    assert_eq!(run.read_hint("best").await.expect("reads"), None);
    run.write_hint("best", Version::new(1, 7)).await.expect("writes");
    assert_eq!(run.read_hint("best").await.expect("reads"), Some(Version::new(1, 7)));
    store.put("runs/mnist/best.json", "{".into()).await.expect("writes");
    assert_eq!(run.read_hint("best").await.expect("a broken hint is none"), None);
    assert!(run.write_hint("../x", Version::new(1, 7)).await.is_err());

    assert_eq!(run.final_model().await.expect("reads"), None);
    run.write_final_model("done".into()).await.expect("writes");
    let path = store.local_path(&run.final_model_path()).expect("is local");
    assert_eq!(std::fs::read(path).expect("people find it"), b"done");

    std::fs::write(folder.path().join("runs/mnist/version0.safetensors"), "vO").expect("writes");
    assert!(matches!(run.version0().await, Err(DataError::Damaged { .. })));
    run.delete().await.expect("deletes");
    assert!(list_runs(&store).await.expect("lists").is_empty());
    assert!(!folder.path().join("runs/mnist").exists());
}

#[tokio::test]
async fn a_complete_checkpoint_is_never_overwritten() {
    let store = memory();
    let run = files(&store);
    run.write_checkpoint(&checkpoint(1, 10)).await.expect("writes");
    run.write_checkpoint(&checkpoint(1, 10)).await.expect("the same again is fine");
    let mut other = checkpoint(1, 10);
    other.model = "other".into();
    assert!(matches!(run.write_checkpoint(&other).await, Err(DataError::Exists { .. })));
    assert_eq!(newest(&store).await, Some(checkpoint(1, 10)));
    let named = run.checkpoint(Version::new(1, 10)).await.expect("reads");
    assert_eq!(named, Some(checkpoint(1, 10)));
    assert_eq!(run.checkpoint(Version::new(1, 11)).await.expect("reads"), None);
}

#[tokio::test]
async fn damage_is_passed_over_aloud() {
    let spoil: [(&str, Option<&str>); 5] = [
        ("model.safetensors", Some("model 2.3x")),
        ("model.safetensors", Some("short")),
        ("optimiser.safetensors", None),
        ("manifest.json", Some("{ \"format\": 1, ")),
        ("manifest.json", Some("")),
    ];
    for (file, bytes) in spoil {
        let store = memory();
        let run = files(&store);
        // Generations come first, then numbers.
        for (generation, number) in [(1, 900), (2, 3), (2, 1)] {
            run.write_checkpoint(&checkpoint(generation, number)).await.expect("writes");
        }
        assert_eq!(newest(&store).await, Some(checkpoint(2, 3)));
        let path = format!("runs/mnist/checkpoints/000000000002-000000000003/{file}");
        match bytes {
            Some(bytes) => store.put(&path, bytes.to_owned().into()).await.expect("writes"),
            None => store.delete(&path).await.expect("deletes"),
        }
        let found = run.newest_checkpoint().await.expect("reads");
        assert_eq!(found.checkpoint, Some(checkpoint(2, 1)), "{file}");
        let [warning] = &found.warnings[..] else { panic!("{:?}", found.warnings) };
        assert!(warning.contains("2.3") && warning.contains(&path), "{warning}");
    }
}

#[tokio::test]
async fn a_newer_format_is_an_error_not_a_reason_to_go_back() {
    let store = memory();
    let run = files(&store);
    run.write_checkpoint(&checkpoint(1, 1)).await.expect("writes");
    let path = "runs/mnist/checkpoints/000000000001-000000000002/manifest.json";
    store.put(path, "{\"format\": 99}".into()).await.expect("writes");
    let error = run.newest_checkpoint().await.expect_err("cannot be read");
    assert!(matches!(error, DataError::Format { found: 99, .. }), "{error:?}");
}

#[tokio::test]
async fn retention_keeps_the_newest_the_named_and_what_may_be_in_the_making() {
    let folder = tempfile::tempdir().expect("a folder");
    let local = Store::open(&folder.path().to_string_lossy()).expect("opens");
    for store in [local, memory()] {
        for _ in 0..2 {
            claim_generation(&store, "test").await.expect("claims");
        }
        let run = files(&store);
        for (generation, number) in [(1, 1), (1, 2), (2, 3), (2, 4), (2, 5)] {
            run.write_checkpoint(&checkpoint(generation, number)).await.expect("writes");
        }
        let half = |name: &str| format!("runs/mnist/checkpoints/{name}/model.safetensors");
        let (old, new) = ("000000000001-000000000009", "000000000002-000000000006");
        store.put(&half(old), "x".into()).await.expect("writes");
        store.put(&half(new), "x".into()).await.expect("writes");
        // A newest one that is damaged does not count as kept.
        let cut = "runs/mnist/checkpoints/000000000002-000000000005/optimiser.safetensors";
        store.put(cut, "x".into()).await.expect("writes");

        let gone = run.retain(1, &[Version::new(1, 1)]).await.expect("retains");
        let version = Version::new;
        assert_eq!(gone, [version(2, 3), version(1, 9), version(1, 2)]);
        let found = run.newest_checkpoint().await.expect("reads");
        assert_eq!(found.checkpoint, Some(checkpoint(2, 4)));
        assert_eq!(found.warnings.len(), 1);
        let best = run.checkpoint(version(1, 1)).await.expect("reads");
        assert_eq!(best, Some(checkpoint(1, 1)));
        assert!(store.exists(&half(new)).await.expect("asks"), "it may be in the making");
        assert_eq!(run.retain(0, &[]).await.expect("retains"), [version(1, 1)]);
        assert_eq!(
            run.newest_checkpoint().await.expect("reads").checkpoint,
            Some(checkpoint(2, 4)),
            "one always stays"
        );
    }
}
