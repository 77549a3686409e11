//! The headers of a contribution and of its answer. Input: lines of `name: value`.
#![no_main]

use http::{HeaderMap, HeaderName, HeaderValue};
use libfuzzer_sys::fuzz_target;
use skep_wire::{Envelope, Receipt};

fn headers(bytes: &[u8]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n').take(64) {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) = (line[..colon].trim_ascii(), line[colon + 1..].trim_ascii());
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name), HeaderValue::from_bytes(value))
        {
            headers.append(name, value);
        }
    }
    headers
}

fuzz_target!(|bytes: &[u8]| {
    let headers = headers(bytes);
    if let Ok(envelope) = Envelope::read(&headers) {
        let mut own = HeaderMap::new();
        envelope.write(&mut own);
        let again = Envelope::read(&own).expect("reads what it writes");
        // A loss that is not a number equals nothing, not even itself.
        assert!(again == envelope || envelope.loss.is_some_and(f64::is_nan));
    }
    if let Ok(receipt) = Receipt::read(&headers) {
        let mut own = HeaderMap::new();
        receipt.write(&mut own);
        assert_eq!(Receipt::read(&own).expect("reads what it writes"), receipt);
    }
});
