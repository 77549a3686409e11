//! Versions, leases, encodings, hashes and names of runs: short texts that become paths and keys.
#![no_main]

use libfuzzer_sys::fuzz_target;
use skep_wire::{Encoding, LeaseId, RunSpec, ShardRef, Version};

fuzz_target!(|text: &str| {
    if let Ok(version) = text.parse::<Version>() {
        assert_eq!(version.to_string().parse::<Version>().expect("own form"), version);
    }
    if let Ok(lease) = text.parse::<LeaseId>() {
        assert_eq!(lease.to_string(), text.to_ascii_lowercase());
    }
    if let Ok(encoding) = text.parse::<Encoding>() {
        assert_eq!(encoding.as_str(), text);
    }
    if RunSpec::is_name(text) || ShardRef::is_hash(text) {
        assert!(!text.starts_with('.') && !text.contains(['/', '\\', '\0', ' ']));
    }
    assert!(!(ShardRef::is_name(text) && ShardRef::is_hash(text)));
    assert_eq!(skep_data::shard_path(text).is_ok(), ShardRef::is_hash(text));
});
