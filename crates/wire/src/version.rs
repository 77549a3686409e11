//! The name of one state of the parameters.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::WireError;

/// `(generation, number)`, written `generation.number`. The number grows by one with every update;
/// the generation with every start of a hive on a store, so that nothing that was published is
/// ever published again with other bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Version {
    /// Which start of a hive made it.
    pub generation: u64,
    /// How many updates led to it.
    pub number: u64,
}

impl Version {
    /// Names a version.
    pub fn new(generation: u64, number: u64) -> Self {
        Self { generation, number }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.generation, self.number)
    }
}

impl FromStr for Version {
    type Err = WireError;

    fn from_str(text: &str) -> Result<Self, WireError> {
        let bad = || WireError::Version(text.chars().take(64).collect());
        let digits = |part: &str| {
            if part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()) {
                return Err(bad());
            }
            part.parse().map_err(|_| bad())
        };
        let (generation, number) = text.split_once('.').ok_or_else(bad)?;
        Ok(Self { generation: digits(generation)?, number: digits(number)? })
    }
}

impl Serialize for Version {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes_and_refuses_the_rest() {
        let version = Version::new(3, 41);
        assert_eq!(version.to_string().parse::<Version>().expect("own form"), version);
        for bad in ["", "3", "3.", ".4", "3.4.5", "+3.4", "3.-4", "a.b", "99999999999999999999.1"] {
            assert!(bad.parse::<Version>().is_err(), "{bad:?} was taken");
        }
        assert!(Version::new(1, 900) < Version::new(2, 1), "generations come first");
    }
}
