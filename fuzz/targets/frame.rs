//! A safetensors file as a contribution: parsed, adopted, read, widened.
#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use skep_wire::{Dtype, Frame, FrameView, Layout};

fn layout(floats: Dtype) -> Arc<Layout> {
    let tensors = [("w", floats, vec![2, 2]), ("n", Dtype::I64, vec![]), ("u", Dtype::U8, vec![3])];
    let tensors = tensors.into_iter().map(|(name, dtype, shape)| (name.to_owned(), dtype, shape));
    Arc::new(Layout::new(tensors.collect()).expect("a good layout"))
}

static WIDE: LazyLock<Arc<Layout>> = LazyLock::new(|| layout(Dtype::F32));
static NARROW: LazyLock<Arc<Layout>> = LazyLock::new(|| layout(Dtype::BF16));

fuzz_target!(|bytes: &[u8]| {
    if let Ok(view) = FrameView::parse(bytes) {
        for (_, tensor) in view.tensors.iter() {
            let bits = tensor.shape().iter().product::<usize>() * tensor.dtype().bitsize();
            assert_eq!(tensor.data().len() * 8, bits);
        }
    }
    let mut words = vec![0u64; bytes.len().div_ceil(8)];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks(8)) {
        let mut padded = [0; 8];
        padded[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(padded);
    }
    for layout in [&WIDE, &NARROW] {
        let read = Frame::read(layout, bytes);
        if let Ok(adopted) = Frame::adopt(layout, words.clone(), bytes.len()) {
            assert_eq!(adopted.as_bytes(), read.as_ref().expect("its own header").as_bytes());
        }
        if let Ok(frame) = read {
            assert_eq!(frame.as_bytes().len(), layout.total_bytes());
            let wide = frame.convert(&WIDE).expect("the same tensors");
            assert_eq!(wide.floats().len(), 4);
        }
    }
});
