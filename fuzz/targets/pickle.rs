//! A pickled state dict without the zip around it, whose checksums would keep a fuzzer out.
#![no_main]

use libfuzzer_sys::fuzz_target;
use skep_data::read_state_dict;

fuzz_target!(|bytes: &[u8]| {
    const LIMIT: usize = 1 << 16;
    let storage = [7u8; 64];
    if let Ok(tensors) = read_state_dict(bytes, |_| Some(&storage), LIMIT) {
        let total: usize = tensors.values().map(|tensor| tensor.bytes.len()).sum();
        assert!(total <= LIMIT);
    }
});
