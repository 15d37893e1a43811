//! What ranks compare to find out whether they agree.

use std::fmt;

/// 64 bits that differ, but for chance, where the things written differ: ranks compare them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub u64);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Writes things into a [`Digest`]: FNV-1a, which is the same on every machine and in every version.
///
/// Texts and bytes are written after their length, so that `("ab", "c")` differs from `("a", "bc")`.
///
/// ```
/// use polarshard_partition::DigestWriter;
/// let digest = DigestWriter::new().str("lr").u64(0.02f64.to_bits()).finish();
/// assert_eq!(digest.to_string(), "1cba0ad75f6014df");
/// ```
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct DigestWriter(u64);

impl DigestWriter {
    /// Nothing written yet: FNV's offset basis.
    pub const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    /// With a number.
    pub fn u64(self, value: u64) -> Self {
        self.raw(&value.to_le_bytes())
    }

    /// With a text.
    pub fn str(self, value: &str) -> Self {
        self.bytes(value.as_bytes())
    }

    /// With bytes.
    pub fn bytes(self, value: &[u8]) -> Self {
        self.u64(value.len() as u64).raw(value)
    }

    /// The digest of all that was written, in order.
    pub const fn finish(self) -> Digest {
        Digest(self.0)
    }

    fn raw(self, bytes: &[u8]) -> Self {
        Self(bytes.iter().fold(self.0, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        }))
    }
}

impl Default for DigestWriter {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published test vectors of FNV-1a 64.
    #[test]
    fn the_hash_is_fnv_1a() {
        for (text, hash) in [
            ("", 0xcbf2_9ce4_8422_2325),
            ("a", 0xaf63_dc4c_8601_ec8c),
            ("foobar", 0x8594_4171_f739_67e8),
        ] {
            assert_eq!(
                DigestWriter::default().raw(text.as_bytes()).finish(),
                Digest(hash),
                "{text}"
            );
        }
    }

    #[test]
    fn lengths_keep_texts_apart() {
        assert_ne!(
            DigestWriter::new().str("ab").str("c").finish(),
            DigestWriter::new().str("a").str("bc").finish()
        );
        assert_ne!(
            DigestWriter::new().bytes(&[]).finish(),
            DigestWriter::new().finish()
        );
        assert_eq!(
            DigestWriter::new().str("ab").finish(),
            DigestWriter::new().u64(2).raw(b"ab").finish()
        );
        assert_eq!(Digest(0xab).to_string(), "00000000000000ab");
    }
}
