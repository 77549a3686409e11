//! The shards a worker has at hand: fetched from the hive, checked against their hash, kept in
//! memory up to a limit.

use std::collections::VecDeque;
use std::sync::Arc;

use skep_data::{DataError, Table, shard_hash};
use skep_wire::ShardRef;

use crate::{Client, WorkerError};

/// Shards in memory, the one used last at the end.
pub(crate) struct ShardCache {
    limit: u64,
    held: VecDeque<(ShardRef, Arc<Table>)>,
}

impl ShardCache {
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, held: VecDeque::new() }
    }

    /// What is at hand, as a request for a lease names it.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.held.iter().map(|(shard, _)| shard.id().to_owned()).collect()
    }

    /// A shard, from memory or from the hive.
    pub(crate) async fn get(
        &mut self,
        client: &Client,
        run: &str,
        shard: &ShardRef,
    ) -> Result<Arc<Table>, WorkerError> {
        if let Some(at) = self.held.iter().position(|(held, _)| held.id() == shard.id())
            && let Some(entry) = self.held.remove(at)
        {
            let table = entry.1.clone();
            self.held.push_back(entry);
            return Ok(table);
        }
        if !shard.is_kept() {
            let (run, shard) = (run.to_owned(), shard.name.clone());
            return Err(WorkerError::NotKept { run, shard });
        }
        self.make_room(shard.bytes);
        let bytes = client.shard(run, &shard.hash).await?;
        let bytes = bytes.as_ref();
        let found = shard_hash(bytes);
        if found != shard.hash {
            return Err(WorkerError::System(format!(
                "shard {} arrived as {found}: the hive's store is damaged",
                shard.hash
            )));
        }
        let table = Arc::new(Table::from_shard(bytes)?);
        if table.rows() as u64 != shard.samples {
            return Err(WorkerError::Data(DataError::Damaged {
                path: shard.hash.clone(),
                reason: format!("{} rows, not {}", table.rows(), shard.samples),
            }));
        }
        self.held.push_back((shard.clone(), table.clone()));
        Ok(table)
    }

    fn make_room(&mut self, bytes: u64) {
        let held = |held: &VecDeque<(ShardRef, Arc<Table>)>| {
            held.iter().map(|(shard, _)| shard.bytes).sum::<u64>()
        };
        while !self.held.is_empty() && held(&self.held) + bytes > self.limit {
            self.held.pop_front();
        }
    }
}
