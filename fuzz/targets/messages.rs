//! JSON from outside. The first byte says which message.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;
use skep_wire::{
    ErrorBody, EvaluationCounts, GiveBack, Job, KeyRequest, LeaseAnswer, LeaseRequest, LogLine,
    Manifest, RunChange, RunSpec, RunView, Schema,
};

/// What was read can be written, and what was written can be read.
fn check<T: DeserializeOwned + Serialize>(bytes: &[u8]) {
    if let Ok(message) = serde_json::from_slice::<T>(bytes) {
        let text = serde_json::to_vec(&message).expect("can be written");
        serde_json::from_slice::<T>(&text).expect("can be read again");
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, json)) = bytes.split_first() else { return };
    match which {
        b'l' => check::<LeaseRequest>(json),
        b'a' => check::<LeaseAnswer>(json),
        b'r' => check::<RunSpec>(json),
        b'v' => check::<RunView>(json),
        b'j' => check::<Job>(json),
        b's' => check::<Schema>(json),
        b'm' => check::<Manifest>(json),
        b'k' => check::<KeyRequest>(json),
        b'g' => check::<GiveBack>(json),
        b'o' => check::<Vec<LogLine>>(json),
        b'c' => check::<RunChange>(json),
        b'e' => check::<EvaluationCounts>(json),
        _ => check::<ErrorBody>(json),
    }
});
