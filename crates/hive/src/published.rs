//! The versions that readers can have at once: the newest, and those that are being measured.
//!
//! A reader gets all tensors of one version or none: it holds a snapshot, and snapshots never
//! change. Their number is capped, so that slow readers cannot fill the memory with old versions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use skep_wire::{Encoding, Frame, Layout, Role, Schema, Version, WireError, Without};
use tokio::sync::watch;

/// How many snapshots may be alive at once before readers are asked to come back.
pub(crate) const MOST_SNAPSHOTS: usize = 64;

/// In which form a reader wants a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    pub(crate) encoding: Encoding,
    pub(crate) without: Option<Without>,
}

impl Form {
    /// The name of a version in this form.
    pub(crate) fn tag(self, version: Version) -> String {
        let encoding = self.encoding.as_str();
        match self.without {
            None => format!("{version}.{encoding}"),
            Some(without) => format!("{version}.{encoding}.without-{}", without.as_str()),
        }
    }
}

/// The layouts of the forms that are not the version itself.
pub(crate) struct FormLayouts {
    narrow: Arc<Layout>,
    /// Without frozen tensors, wide and narrow; where there are none, that is the whole version.
    changing: Option<(Arc<Layout>, Arc<Layout>)>,
}

impl FormLayouts {
    pub(crate) fn new(schema: &Schema) -> Result<Self, WireError> {
        let changing = |encoding| Layout::of_changing(schema, encoding).map(Arc::new);
        let any_frozen = schema.tensors().iter().any(|tensor| tensor.role == Role::Frozen);
        let both = || Ok((changing(Encoding::F32)?, changing(Encoding::Bf16)?));
        Ok(Self {
            narrow: Arc::new(Layout::of_version(schema, Encoding::Bf16)?),
            changing: any_frozen.then(both).transpose()?,
        })
    }
}

/// One version, as readers get it. Other forms of it are made once, when someone wants them.
pub(crate) struct Snapshot {
    pub(crate) version: Version,
    pub(crate) frame: Arc<Frame>,
    narrow: OnceLock<Bytes>,
    changing: OnceLock<Bytes>,
    narrow_changing: OnceLock<Bytes>,
    layouts: Arc<FormLayouts>,
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
    /// The safetensors file in a form, shared, not copied; it keeps the snapshot alive.
    pub(crate) fn bytes(self: &Arc<Self>, form: Form) -> Bytes {
        let changing = form.without.and(self.layouts.changing.as_ref());
        let bytes = match (form.encoding, changing) {
            (Encoding::Bf16, None) => self.made(&self.narrow, &self.layouts.narrow),
            (Encoding::Bf16, Some((_, narrow))) => self.made(&self.narrow_changing, narrow),
            (_, None) => frame_bytes(&self.frame),
            (_, Some((wide, _))) => self.made(&self.changing, wide),
        };
        Bytes::from_owner(SnapshotBytes { snapshot: self.clone(), bytes })
    }

    fn made(&self, place: &OnceLock<Bytes>, layout: &Arc<Layout>) -> Bytes {
        let make = || match self.frame.convert(layout) {
            Ok(frame) => frame_bytes(&Arc::new(frame)),
            Err(error) => unreachable!("both layouts are the run's own: {error}"),
        };
        place.get_or_init(make).clone()
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
    layouts: Arc<FormLayouts>,
    alive: Arc<AtomicUsize>,
}

impl Published {
    pub(crate) fn new(version: Version, frame: Arc<Frame>, layouts: FormLayouts) -> Self {
        let alive = Arc::new(AtomicUsize::new(0));
        let layouts = Arc::new(layouts);
        let first = Self::snapshot(&alive, version, frame, &layouts);
        Self { newest: watch::Sender::new(first), pinned: Mutex::default(), layouts, alive }
    }

    fn snapshot(
        alive: &Arc<AtomicUsize>,
        version: Version,
        frame: Arc<Frame>,
        layouts: &Arc<FormLayouts>,
    ) -> Arc<Snapshot> {
        alive.fetch_add(1, Ordering::Relaxed);
        Arc::new(Snapshot {
            version,
            frame,
            narrow: OnceLock::new(),
            changing: OnceLock::new(),
            narrow_changing: OnceLock::new(),
            layouts: layouts.clone(),
            alive: alive.clone(),
        })
    }

    pub(crate) fn publish(&self, version: Version, frame: Arc<Frame>) {
        let next = Self::snapshot(&self.alive, version, frame, &self.layouts);
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

    /// A version that was read from the store, in every form that readers can have.
    pub(crate) fn revived(&self, version: Version, frame: Arc<Frame>) -> Arc<Snapshot> {
        Self::snapshot(&self.alive, version, frame, &self.layouts)
    }

    /// Whether slow readers hold too many old versions.
    pub(crate) fn crowded(&self) -> bool {
        self.alive.load(Ordering::Relaxed) > MOST_SNAPSHOTS
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Version, Arc<Snapshot>>> {
        self.pinned.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
