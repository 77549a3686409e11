//! Who may do what: keys with a role and a run, kept as hashes, compared in constant time, never
//! logged.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{HeaderMap, Method, header};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use skep_data::Store;
use skep_wire::{ErrorCode, KeyIssued, KeyRequest, KeyRole};
use subtle::ConstantTimeEq;

use crate::{ApiError, HiveError};

/// A key as it was issued: shown once.
pub type IssuedKey = KeyIssued;

/// What is kept of a key.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct KeyRecord {
    /// SHA-256 of the whole key, in hexadecimal digits. Keys are 256 random bits, so a plain hash
    /// cannot be searched backwards.
    hash: String,
    role: KeyRole,
    #[serde(default)]
    run: Option<String>,
    /// Seconds since 1970.
    #[serde(default)]
    expires: Option<u64>,
}

/// The keys of a hive, or none at all.
pub struct Access {
    /// Without keys everyone may do everything: a hive on loopback, or one told to be open.
    open: bool,
    keys: RwLock<BTreeMap<String, KeyRecord>>,
}

impl Access {
    /// Everyone may do everything.
    pub fn open() -> Self {
        Self { open: true, keys: RwLock::default() }
    }

    /// Only keys of the store, and `admin`, may.
    pub async fn with_keys(store: &Store, admin: &str) -> Result<Self, HiveError> {
        if admin.trim().len() < 16 {
            return Err(HiveError::Keys(
                "the admin key is shorter than 16 characters; `skep key new` makes a good one"
                    .to_owned(),
            ));
        }
        let mut keys = BTreeMap::new();
        for path in store.list("keys").await? {
            let bytes = store.get(&path).await?;
            let record: KeyRecord = serde_json::from_slice(&bytes)
                .map_err(|error| HiveError::Keys(format!("{path}: {error}")))?;
            let id = path.trim_start_matches("keys/").trim_end_matches(".json").to_owned();
            keys.insert(id, record);
        }
        let record =
            KeyRecord { hash: hash(admin.trim()), role: KeyRole::Admin, run: None, expires: None };
        keys.insert("admin".to_owned(), record);
        Ok(Self { open: false, keys: RwLock::new(keys) })
    }

    /// Makes a key and keeps its hash.
    pub async fn issue(&self, store: &Store, request: &KeyRequest) -> Result<KeyIssued, ApiError> {
        let id = random_hex(6);
        let key = format!("skep_{id}_{}", random_hex(32));
        let expires = request.seconds.map(|seconds| now() + seconds.clamp(0.0, 1e10) as u64);
        let record =
            KeyRecord { hash: hash(&key), role: request.role, run: request.run.clone(), expires };
        let json = serde_json::to_vec(&record).map_err(|error| ApiError::internal(&error))?;
        store
            .create(&format!("keys/{id}.json"), Bytes::from(json))
            .await
            .map_err(|error| ApiError::internal(&error))?;
        self.keys.write().unwrap_or_else(PoisonError::into_inner).insert(id.clone(), record);
        Ok(KeyIssued { id, key })
    }

    /// Takes a key back.
    pub async fn revoke(&self, store: &Store, id: &str) -> Result<(), ApiError> {
        let known = self.keys.read().unwrap_or_else(PoisonError::into_inner).contains_key(id);
        // The admin key is not the store's: who has the hive's key file decides on it.
        if !known || id == "admin" {
            return Err(ApiError::not_found(format!("there is no key `{id}`")));
        }
        // From the store first: a key that stayed there would be back with the next start.
        store
            .delete(&format!("keys/{id}.json"))
            .await
            .map_err(|error| ApiError::internal(&error))?;
        self.keys.write().unwrap_or_else(PoisonError::into_inner).remove(id);
        Ok(())
    }

    /// Whether the request's key allows a role on a run.
    pub(crate) fn allow(
        &self,
        headers: &HeaderMap,
        role: KeyRole,
        run: Option<&str>,
    ) -> Result<(), ApiError> {
        if self.open {
            return Ok(());
        }
        let unknown = |message: &str| {
            ApiError::new(
                ErrorCode::Unauthorised,
                message,
                "set SKEP_KEY or --key-file to a key that `skep key create` has issued",
            )
        };
        let given = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .and_then(|text| text.strip_prefix("Bearer "))
            .ok_or_else(|| unknown("this hive needs a key"))?;
        let given = hash(given.trim());
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        let mut found = None;
        for record in keys.values() {
            // Every key is compared, in constant time each.
            if bool::from(record.hash.as_bytes().ct_eq(given.as_bytes())) {
                found = Some(record);
            }
        }
        let record = found.ok_or_else(|| unknown("the key is not known here"))?;
        if record.expires.is_some_and(|expires| now() >= expires) {
            return Err(unknown("the key has expired"));
        }
        let enough = record.role >= role;
        let this_run = match (&record.run, run) {
            (None, _) => true,
            (Some(own), Some(run)) => own == run,
            // A key of one run may not see what concerns all of them.
            (Some(_), None) => false,
        };
        if enough && this_run {
            return Ok(());
        }
        let (message, hint) = match (&record.run, run) {
            _ if !enough => {
                (format!("the key's role is {:?}; this needs {role:?}", record.role), String::new())
            }
            (Some(own), None) => (
                "the key is for one run, and this concerns all of them".to_owned(),
                format!("name the run: --run {own}"),
            ),
            _ => ("the key is for another run".to_owned(), String::new()),
        };
        let hint = if hint.is_empty() { "use a key that allows it".to_owned() } else { hint };
        Err(ApiError::new(ErrorCode::Forbidden, message, hint))
    }

    /// The role that a route needs; none for probes and for the page, which holds nothing of a run
    /// and asks for a key itself. What is not listed needs an admin.
    pub(crate) fn needed(method: &Method, route: &str) -> Option<KeyRole> {
        let read = method == Method::GET || method == Method::HEAD;
        match route {
            "/" | "/healthz" | "/readyz" | "/openapi.json" => None,
            "/metrics" | "/v1/runs" if read => Some(KeyRole::Reader),
            "/v1/runs/{run}"
            | "/v1/runs/{run}/parameters"
            | "/v1/runs/{run}/events"
            | "/v1/runs/{run}/history"
            | "/v1/runs/{run}/progress"
            | "/v1/runs/{run}/logs"
                if read =>
            {
                Some(KeyRole::Reader)
            }
            "/v1/runs/{run}/shards/{shard}" if read => Some(KeyRole::Worker),
            "/v1/runs/{run}/leases"
            | "/v1/runs/{run}/leases/{lease}"
            | "/v1/runs/{run}/contributions"
            | "/v1/runs/{run}/logs" => Some(KeyRole::Worker),
            _ => Some(KeyRole::Admin),
        }
    }
}

fn hash(key: &str) -> String {
    Sha256::digest(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn random_hex(bytes: usize) -> String {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random).expect("the operating system has randomness");
    random.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
