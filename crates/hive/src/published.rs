//! The versions that readers can have: the newest, and those that are being measured.
//!
//! A reader gets all tensors of one version or none: it holds a snapshot, and snapshots never
//! change. Their number is capped, so that slow readers cannot fill the memory with old versions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use skep_wire::{Encoding, Frame, Layout, Version};
use tokio::sync::watch;

/// How many snapshots may be alive at once before readers are asked to come back.
pub(crate) const MOST_SNAPSHOTS: usize = 64;

/// One version, as readers get it.
pub(crate) struct Snapshot {
    pub(crate) version: Version,
    pub(crate) frame: Arc<Frame>,
    narrow: OnceLock<Bytes>,
    narrow_layout: Arc<Layout>,
    alive: Arc<AtomicUsize>,
}

/// Lets shared bytes keep the frame they come from alive.
struct FrameBytes(Arc<Frame>);

impl AsRef<[u8]> for FrameBytes {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// Lets the body of an answer keep its snapshot counted as alive until it is sent.
struct SnapshotBytes {
    snapshot: Arc<Snapshot>,
    bytes: Bytes,
}

impl AsRef<[u8]> for SnapshotBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Snapshot {
    /// The safetensors file in an encoding, shared, not copied; it keeps the snapshot alive.
    pub(crate) fn bytes(self: &Arc<Self>, encoding: Encoding) -> Bytes {
        let bytes = match encoding {
            Encoding::Bf16 => self
                .narrow
                .get_or_init(|| match self.frame.convert(&self.narrow_layout) {
                    Ok(narrow) => frame_bytes(&Arc::new(narrow)),
                    Err(error) => unreachable!("both layouts are the run's own: {error}"),
                })
                .clone(),
            _ => frame_bytes(&self.frame),
        };
        Bytes::from_owner(SnapshotBytes { snapshot: self.clone(), bytes })
    }
}

impl AsRef<Snapshot> for SnapshotBytes {
    fn as_ref(&self) -> &Snapshot {
        &self.snapshot
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A frame as shared bytes.
pub(crate) fn frame_bytes(frame: &Arc<Frame>) -> Bytes {
    Bytes::from_owner(FrameBytes(frame.clone()))
}

/// What readers of a run can have.
pub(crate) struct Published {
    newest: watch::Sender<Arc<Snapshot>>,
    pinned: Mutex<BTreeMap<Version, Arc<Snapshot>>>,
    narrow_layout: Arc<Layout>,
    alive: Arc<AtomicUsize>,
}

impl Published {
    pub(crate) fn new(version: Version, frame: Arc<Frame>, narrow_layout: Arc<Layout>) -> Self {
        let alive = Arc::new(AtomicUsize::new(0));
        let first = Self::snapshot(&alive, version, frame, &narrow_layout);
        Self { newest: watch::Sender::new(first), pinned: Mutex::default(), narrow_layout, alive }
    }

    fn snapshot(
        alive: &Arc<AtomicUsize>,
        version: Version,
        frame: Arc<Frame>,
        narrow_layout: &Arc<Layout>,
    ) -> Arc<Snapshot> {
        alive.fetch_add(1, Ordering::Relaxed);
        Arc::new(Snapshot {
            version,
            frame,
            narrow: OnceLock::new(),
            narrow_layout: narrow_layout.clone(),
            alive: alive.clone(),
        })
    }

    pub(crate) fn publish(&self, version: Version, frame: Arc<Frame>) {
        let next = Self::snapshot(&self.alive, version, frame, &self.narrow_layout);
        self.newest.send_replace(next);
    }

    pub(crate) fn newest(&self) -> Arc<Snapshot> {
        self.newest.borrow().clone()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.newest.subscribe()
    }

    /// Keeps the newest version until it is let go.
    pub(crate) fn pin(&self) {
        let newest = self.newest();
        self.lock().insert(newest.version, newest);
    }

    pub(crate) fn unpin(&self, version: Version) {
        self.lock().remove(&version);
    }

    /// One version, if it is the newest or kept.
    pub(crate) fn get(&self, version: Version) -> Option<Arc<Snapshot>> {
        let newest = self.newest();
        if newest.version == version {
            return Some(newest);
        }
        self.lock().get(&version).cloned()
    }

    /// Whether slow readers hold too many old versions.
    pub(crate) fn crowded(&self) -> bool {
        self.alive.load(Ordering::Relaxed) > MOST_SNAPSHOTS
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Version, Arc<Snapshot>>> {
        self.pinned.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
