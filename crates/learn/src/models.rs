//! The models that come with Skep, one file each.

use std::sync::Arc;

use crate::{Burn, Task};

pub mod lenet5;
pub mod text;
pub mod text_average;
pub mod text_bigru;

/// Every task that a worker of this build knows.
pub fn tasks() -> Vec<Arc<dyn Task>> {
    vec![
        Arc::new(Burn(lenet5::LeNet5::default())),
        Arc::new(Burn(text_average::TextAverage::default())),
        Arc::new(Burn(text_bigru::TextBigru::default())),
    ]
}
