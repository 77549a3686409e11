//! The JSON files of a run in a store that someone else can write to. The first byte says which.
#![no_main]

use std::sync::Arc;

use futures::executor::block_on;
use libfuzzer_sys::fuzz_target;
use object_store::memory::InMemory;
use skep_data::{RunFiles, Store, newest_generation};

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, json)) = bytes.split_first() else { return };
    let path = match which % 4 {
        0 => "runs/bees/checkpoints/1-2/manifest.json",
        1 => "runs/bees/run.json",
        2 => "runs/bees/latest.json",
        _ => "runs/bees/state.json",
    };
    let store = Store::with(Arc::new(InMemory::new()));
    block_on(async {
        store.put(path, json.to_vec().into()).await.expect("memory takes it");
        let files = RunFiles::new(store.clone(), "bees").expect("a good name");
        let _ = files.newest_checkpoint().await;
        let _ = files.spec().await;
        let _ = files.version0().await;
        let _ = files.read_hint("latest").await;
        let _ = files.retain(1, &[]).await;
        let _ = newest_generation(&store).await;
    });
});
