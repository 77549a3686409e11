//! TensorBoard's event files: records of length, data and checksums (TFRecord), each an `Event` of
//! TensorFlow's protocol buffers with scalar summaries. So little of both that it is written by
//! hand.

use skep_wire::{Measurement, Point, Split};

/// One event file in the making.
pub(crate) struct EventFile {
    bytes: Vec<u8>,
}

impl EventFile {
    /// A file that says what it is. What other files have from this step on is void: that is how a
    /// run which went back to a checkpoint is drawn once.
    pub(crate) fn new(time: u64, from_step: Option<u64>) -> Self {
        let mut file = Self { bytes: Vec::new() };
        let mut event = event(time, 0);
        text(&mut event, 3, b"brain.Event:2");
        file.record(&event);
        if let Some(step) = from_step {
            let mut event = self::event(time, step);
            const START: u64 = 1;
            let mut log = Vec::new();
            number(&mut log, 1, START);
            text(&mut event, 7, &log);
            file.record(&event);
        }
        file
    }

    pub(crate) fn point(&mut self, point: &Point) {
        let mut scalars = vec![
            ("optimiser/learning_rate", point.learning_rate),
            ("optimiser/gradient_norm", point.norm),
            ("pace/samples_per_second", point.samples_per_second),
            ("pace/versions_per_second", point.versions_per_second),
            ("pace/workers", point.workers as f64),
            ("pace/staleness", point.staleness),
            ("progress/samples", point.samples as f64),
            ("progress/epoch", point.epoch as f64),
            ("usage/worker_seconds", point.usage.worker_seconds),
            ("usage/received_bytes", point.usage.received_bytes as f64),
            ("usage/sent_bytes", point.usage.sent_bytes as f64),
        ];
        scalars.extend(point.loss.map(|loss| ("loss/train", loss)));
        self.scalars(point.time, point.version.number, &scalars);
    }

    pub(crate) fn measurement(&mut self, measured: &Measurement) {
        let (loss, accuracy) = match measured.split {
            Split::Train => return,
            Split::Validation => ("loss/validation", "accuracy/validation"),
            Split::Test => ("loss/test", "accuracy/test"),
        };
        let mut scalars = vec![(loss, measured.loss)];
        scalars.extend(measured.accuracy.map(|share| (accuracy, share)));
        self.scalars(measured.time, measured.version.number, &scalars);
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    fn scalars(&mut self, time: u64, step: u64, scalars: &[(&str, f64)]) {
        let mut summary = Vec::new();
        for (tag, scalar) in scalars {
            let mut value = Vec::new();
            text(&mut value, 1, tag.as_bytes());
            key(&mut value, 2, FIXED32);
            value.extend((*scalar as f32).to_le_bytes());
            text(&mut summary, 1, &value);
        }
        let mut event = event(time, step);
        text(&mut event, 5, &summary);
        self.record(&event);
    }

    fn record(&mut self, data: &[u8]) {
        let length = (data.len() as u64).to_le_bytes();
        self.bytes.extend(length);
        self.bytes.extend(masked_crc(&length).to_le_bytes());
        self.bytes.extend(data);
        self.bytes.extend(masked_crc(data).to_le_bytes());
    }
}

const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED32: u64 = 5;

fn event(time: u64, step: u64) -> Vec<u8> {
    let mut event = Vec::new();
    key(&mut event, 1, FIXED64);
    event.extend((time as f64 / 1000.0).to_le_bytes());
    number(&mut event, 2, step);
    event
}

fn key(message: &mut Vec<u8>, field: u64, form: u64) {
    varint(message, field << 3 | form);
}

fn number(message: &mut Vec<u8>, field: u64, number: u64) {
    key(message, field, VARINT);
    varint(message, number);
}

fn text(message: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    key(message, field, LENGTH);
    varint(message, bytes.len() as u64);
    message.extend(bytes);
}

fn varint(message: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        message.push(number as u8 | 0x80);
        number >>= 7;
    }
    message.push(number as u8);
}

/// CRC-32C, turned and shifted: TFRecord's way not to take the checksum of a checksum.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Bit by bit: files are small and written rarely.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            let polynomial = if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            crc >> 1 ^ polynomial
        })
    };
    !bytes.iter().fold(u32::MAX, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_the_known_ones() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_file_begins_with_its_version() {
        let bytes = EventFile::new(1_000, None).into_bytes();
        // Length 26: time, step, the text with its key and length.
        assert_eq!(bytes[..8], 26_u64.to_le_bytes());
        assert_eq!(bytes[12..21], [9, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f]);
        assert_eq!(bytes[21..25], [0x10, 0, 0x1a, 13]);
        assert_eq!(&bytes[25..38], b"brain.Event:2");
        assert_eq!(bytes.len(), 8 + 4 + 26 + 4);
    }
}
