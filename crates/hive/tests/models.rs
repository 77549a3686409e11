//! Models over the wire: how differences become versions, and what survives a restart.

mod support;

use serde_json::json;
use skep_wire::{ContributionKind, Envelope, ErrorCode, LeaseView, Outcome, Version};
use support::{RunSetup, Settings, TestHive, envelope};

/// One tensor, two slots of four and two samples in a round.
fn averaged() -> RunSetup {
    let run = RunSetup::new("bees", 3).with("run", json!({ "epochs": 2, "exchange": "models" }));
    RunSetup { train: vec![6], ..run.with("policy", json!({ "kind": "average", "slots": 2 })) }
}

fn model(lease: &LeaseView) -> Envelope {
    Envelope { kind: ContributionKind::Model, ..envelope(lease) }
}

/// Brings home a difference under each of two leases.
async fn round(hive: &TestHive, run: &RunSetup, values: [f32; 2]) {
    for (value, worker) in values.into_iter().zip(["one", "two"]) {
        let lease = hive.lease("bees", worker).await;
        let body = run.gradient(value).as_bytes().to_vec();
        hive.push("bees", &model(&lease), body).ok().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_average_is_weighted_by_samples() {
    let hive = TestHive::start(Settings::default()).await;
    let run = averaged();
    hive.create(&run).await;
    // Four samples of 1 and two of 4.
    round(&hive, &run, [1.0, 4.0]).await;
    let (version, frame) = hive.parameters(&run).await;
    assert_eq!((version, frame.floats()), (Version::new(1, 1), [2.0; 3].as_slice()));
}

/// Nesterov as PyTorch has it, on the negative difference: v = 0.5 v + d, x += 0.5 (d + 0.5 v).
#[tokio::test(flavor = "multi_thread")]
async fn the_outer_optimiser_steps_by_the_average() {
    let hive = TestHive::start(Settings::default()).await;
    let outer = json!({ "kind": "nesterov", "rate": 0.5, "momentum": 0.5 });
    let run = averaged().with("outer", outer);
    hive.create(&run).await;
    round(&hive, &run, [2.0, 2.0]).await;
    assert_eq!(hive.parameters(&run).await.1.floats(), [1.5; 3]);
    round(&hive, &run, [2.0, 2.0]).await;
    assert_eq!(hive.parameters(&run).await.1.floats(), [3.25; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_takes_what_it_exchanges() {
    let hive = TestHive::start(Settings::default()).await;
    let run = averaged();
    hive.create(&run).await;
    let lease = hive.lease("bees", "bee").await;
    let body = run.gradient(1.0).as_bytes().to_vec();
    let refused = hive.push("bees", &envelope(&lease), body.clone()).refused(ErrorCode::BadRequest);
    assert!(refused.await.message.contains("skep-kind: model"));
    let other = RunSetup::new("wasps", 3);
    hive.create(&other).await;
    let lease = hive.lease("wasps", "wasp").await;
    let refused = hive.push("wasps", &model(&lease), body).refused(ErrorCode::BadRequest);
    assert!(refused.await.message.contains("skep-kind: gradient"));
}

/// Half a round is taken over by the next hive, which gives out the other half only.
#[tokio::test(flavor = "multi_thread")]
async fn half_a_round_survives_a_restart() {
    let hive = TestHive::start(Settings::default()).await;
    let run = averaged();
    hive.create(&run).await;
    let lease = hive.lease("bees", "one").await;
    let body = run.gradient(1.0).as_bytes().to_vec();
    let answer = hive.push("bees", &model(&lease), body).ok().await;
    assert_eq!(answer.receipt().outcome, Outcome::Accepted);
    let hive = hive.restart().await;
    let rest = hive.lease("bees", "two").await;
    assert_eq!((rest.first, rest.count, rest.base), (4, 2, Version::new(2, 0)));
    let body = run.gradient(4.0).as_bytes().to_vec();
    let answer = hive.push("bees", &model(&rest), body).ok().await;
    assert_eq!(answer.receipt().outcome, Outcome::Stepped);
    assert_eq!(hive.parameters(&run).await.1.floats(), [2.0; 3]);
}
