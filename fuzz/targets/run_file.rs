//! The file that creates a run: a description that can claim anything, beside tensors that are
//! really there.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use skep_wire::{Encoding, Frame, FrameView, Layout, RUN_METADATA, RunSpec};

fuzz_target!(|bytes: &[u8]| {
    let Ok(view) = FrameView::parse(bytes) else { return };
    let Some(text) = view.metadata.get(RUN_METADATA) else { return };
    let Ok(spec) = RunSpec::from_metadata(text) else { return };
    for encoding in [Encoding::F32, Encoding::Bf16] {
        if let Ok(layout) = Layout::of_gradient(&spec.schema, encoding) {
            assert!(layout.total_bytes() >= layout.data_bytes());
        }
    }
    if let Ok(layout) = Layout::of_version(&spec.schema, Encoding::F32)
        && let Ok(frame) = Frame::read(&Arc::new(layout), bytes)
    {
        assert!(frame.data().len() <= bytes.len() * 2, "memory in proportion to what was sent");
    }
});
