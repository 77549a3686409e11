//! An idx file, compressed or not.
#![no_main]

use libfuzzer_sys::fuzz_target;
use skep_data::idx;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(array) = idx::decode("fuzz", bytes) {
        let again = idx::encode(&array).expect("can be written");
        assert_eq!(idx::decode("fuzz", &again[..]).expect("can be read again").bytes, array.bytes);
    }
});
