//! What texts come from: numpy's arrays of lists without the zip around them, whose checksums would
//! keep a fuzzer out; vocabularies; and texts themselves.
#![no_main]

use libfuzzer_sys::fuzz_target;
use skep_data::corpus::numbers::{self, Numbers};
use skep_data::{Vocabulary, tokeniser};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(Numbers::Lists(lists)) = numbers::decode(bytes) {
        assert!(lists.iter().map(Vec::len).sum::<usize>() <= bytes.len());
    }
    if let Ok(vocabulary) = Vocabulary::parse("fuzz", bytes) {
        assert_eq!(Vocabulary::parse("again", &vocabulary.to_json()).expect("own"), vocabulary);
    }
    let text = String::from_utf8_lossy(bytes);
    assert!(tokeniser::words(&text).len() <= text.len());
});
