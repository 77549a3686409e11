//! Shards that the hive does not keep: it knows their names and counts, and hands out slices of
//! them to workers that can read them.

mod support;

use bytes::Bytes;
use serde_json::{Value, json};
use skep_wire::{AssetRef, ErrorCode, Frame, LeaseAnswer, LeaseKind, RunSpec, ShardRef, Split};
use support::{RunSetup, TestHive, envelope};

/// A run with 8 named and 4 kept samples to train on, and named ones to measure on.
fn mixed() -> (RunSetup, RunSpec, Frame) {
    let mut run = RunSetup::new("bees", 2);
    run.train = vec![4];
    let (mut spec, frame) = run.build();
    spec.manifest.train.push(ShardRef::named("fashion/train", 8));
    spec.manifest.test.push(ShardRef::named("fashion/test", 6));
    (run, spec, frame)
}

/// A hive with `mixed`, whose kept shard is there.
async fn hive() -> (TestHive, RunSetup) {
    let (run, spec, frame) = mixed();
    let hive = TestHive::open().await;
    let bytes = support::shard(4);
    hive.hive.put_shard(&spec.manifest.train[0].hash, bytes).await.expect("is kept");
    hive.hive.create(spec, frame.as_bytes()).await.expect("is created");
    (hive, run)
}

/// Does all the training there is for a worker that reads only this; gives the shards it got.
async fn train(hive: &TestHive, run: &RunSetup, only: &str) -> Vec<u64> {
    let mut shards = Vec::new();
    let request = json!({ "worker": "bee", "only": [only] });
    while let LeaseAnswer::Lease(lease) = hive.ask("bees", request.clone()).await {
        assert_eq!(lease.kind, LeaseKind::Train);
        shards.push(lease.shard);
        hive.work(run, &lease, &run.gradient(-1.0)).await;
    }
    shards
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_of_a_named_shard_go_to_who_can_read_it() {
    let (hive, run) = hive().await;
    let view: Value = hive.get("/v1/runs/bees").ok().await.json();
    let hash = view["manifest"]["train"][0]["hash"].as_str().expect("a hash").to_owned();
    let expected = json!([
        { "hash": hash, "samples": 4, "bytes": 4 },
        { "name": "fashion/train", "samples": 8 },
    ]);
    assert_eq!(view["manifest"]["train"], expected);
    assert_eq!(view["epoch_positions"], 12);

    hive.get(&format!("/v1/runs/bees/shards/{hash}")).ok().await;
    let error = hive.get("/v1/runs/bees/shards/fashion%2Ftrain").refused(ErrorCode::NotFound).await;
    assert_eq!(error.message, "the hive does not keep this shard");
    assert!(error.hint.contains("only workers that have it"), "{error:?}");

    assert_eq!(train(&hive, &run, &hash).await, [0]);
    let hive = hive.restart().await;
    assert_eq!(train(&hive, &run, "fashion/train").await, [1, 1]);
    // The final version is measured by who can read what it is measured on.
    let stranger = hive.ask("bees", json!({ "worker": "bee", "only": [hash] })).await;
    assert!(
        matches!(&stranger, LeaseAnswer::Wait { reason, .. } if reason.contains("cannot read")),
        "{stranger:?}"
    );
    let judge = json!({ "worker": "judge", "only": ["fashion/test"] });
    let LeaseAnswer::Lease(lease) = hive.ask("bees", judge).await else { panic!("no lease") };
    assert_eq!((lease.kind, lease.split, lease.count), (LeaseKind::Evaluate, Split::Test, 6));
    let mut counts = envelope(&lease);
    counts.kind = skep_wire::ContributionKind::Evaluation;
    let body = json!({ "loss_sum": 6.0, "correct": 3 }).to_string();
    hive.push("bees", &counts, body).ok().await;
    let end = hive.ask("bees", json!({ "worker": "bee", "wait": 20.0 })).await;
    assert!(matches!(end, LeaseAnswer::Done { .. }), "{end:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_worker_has_by_name_is_what_it_gets() {
    let (hive, _) = hive().await;
    for (has, shard) in [("fashion/train", 1), ("fashion/test", 0)] {
        let answer = hive.ask("bees", json!({ "worker": has, "has": [has] })).await;
        let LeaseAnswer::Lease(lease) = answer else { panic!("{answer:?}") };
        assert_eq!(lease.shard, shard, "{has}");
    }
}

/// Two shards of the same bytes have the same hash; who can read one can read the other.
#[tokio::test(flavor = "multi_thread")]
async fn shards_of_the_same_name_are_all_meant() {
    let hive = TestHive::open().await;
    let mut run = RunSetup::new("bees", 2);
    run.train = vec![4, 4];
    hive.create(&run).await;
    let hash = hive.view("bees").await.manifest.train[0].hash.clone();
    let mut shards = train(&hive, &run, &hash).await;
    shards.sort_unstable();
    assert_eq!(shards, [0, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_and_counts_that_cannot_be_are_refused() {
    let (_, spec, frame) = mixed();
    let hive = TestHive::open().await;
    let hash = "ab".repeat(32);
    for shard in [
        json!({ "samples": 8 }),
        json!({ "name": "", "samples": 8 }),
        json!({ "name": hash, "samples": 8 }),
        json!({ "name": "two words", "samples": 8 }),
        json!({ "name": "Käfer", "samples": 8 }),
        json!({ "name": "x".repeat(129), "samples": 8 }),
        json!({ "name": "x", "samples": 0 }),
        json!({ "name": "x", "samples": (1u64 << 40) + 1 }),
        json!({ "name": "x", "samples": u64::MAX }),
        json!({ "name": "x", "hash": hash, "samples": 8, "bytes": 8 }),
        json!({ "name": "x", "samples": 8, "bytes": 8 }),
    ] {
        let mut spec = spec.clone();
        spec.manifest.train = vec![serde_json::from_value(shard.clone()).expect("a shard")];
        let refused = hive.hive.create(spec, frame.as_bytes()).await;
        assert_eq!(refused.expect_err("is refused").0.code, ErrorCode::BadRequest, "{shard}");
    }
    // As many as can be said: nothing grows with a count, whatever the policy.
    let mut spec = spec;
    let most = |name: &str| vec![ShardRef::named(name, 1 << 40); 4];
    spec.manifest.train = most("train");
    spec.manifest.validation = most("validation");
    spec.manifest.test = most("test");
    spec.job.train.batch = 1;
    spec.job.policy =
        serde_json::from_value(json!({ "kind": "sync", "slots": u64::MAX })).expect("a policy");
    hive.hive.create(spec, frame.as_bytes()).await.expect("is created");
    let lease = hive.lease("bees", "bee").await;
    let run = RunSetup::new("bees", 2);
    hive.work(&run, &lease, &run.gradient(-1.0)).await;
    hive.call(http::Method::PATCH, "/v1/runs/bees").json(&json!({ "action": "finish" })).ok().await;
    assert_eq!(hive.lease("bees", "bee").await.kind, LeaseKind::Evaluate);
}

/// What a model needs besides its parameters is kept as it is and fetched like a shard.
#[tokio::test(flavor = "multi_thread")]
async fn assets_are_kept_beside_the_model_and_fetched_like_shards() {
    let hive = TestHive::open().await;
    let run = RunSetup::new("bees", 2);
    let words = Bytes::from_static(b"{\"words\":[]}");
    let hash = skep_data::shard_hash(&words);
    let asset = |name: &str| AssetRef { name: name.to_owned(), hash: hash.clone(), bytes: 12 };
    let attempt = async |assets: Vec<AssetRef>| {
        let (mut spec, frame) = run.build();
        for (samples, shard) in run.train.iter().zip(&spec.manifest.train) {
            hive.hive.put_shard(&shard.hash, support::shard(*samples)).await.expect("is kept");
        }
        spec.manifest.assets = assets;
        hive.hive.create(spec, frame.as_bytes()).await.map_err(|error| error.0.message)
    };
    let error = attempt(vec![asset("vocabulary.json")]).await.expect_err("not sent yet");
    assert!(error.contains(&hash) && error.contains("not in the store"), "{error}");
    hive.hive.put_shard(&hash, words.clone()).await.expect("is kept");
    let twice = vec![asset("a"), asset("a")];
    for bad in [vec![asset("../key")], vec![asset("")], twice, vec![asset("a"); 17]] {
        let error = attempt(bad).await.expect_err("no such name");
        assert!(error.contains("at most 16 assets"), "{error}");
    }
    attempt(vec![asset("vocabulary.json")]).await.expect("is created");
    let hive = hive.restart().await;
    let view: Value = hive.get("/v1/runs/bees").ok().await.json();
    assert_eq!(view["manifest"]["assets"][0]["name"], "vocabulary.json");
    let fetched = hive.get(&format!("/v1/runs/bees/shards/{hash}")).ok().await;
    assert_eq!(fetched.body, words);
    let files = skep_data::RunFiles::new(hive.hive.store().clone(), "bees").expect("a name");
    assert_eq!(files.asset("vocabulary.json").await.expect("reads"), Some(words));
    assert_eq!(files.asset("other.json").await.expect("reads"), None);
    assert!(files.asset("../run.json").await.is_err());
}
