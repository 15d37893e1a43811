//! Proof that every rank's weights have the same bits.

use polarshard_partition::{DigestWriter, Rank};

use crate::channel::{Channel, differing, exact};
use crate::error::{Error, Result};
use crate::weights::Weight;

/// Compares a checksum of each weight over ranks.
///
/// # Errors
/// [`Error::ReplicasDiffer`] naming the first weight that differs and the ranks that have it otherwise than rank 0;
/// [`Error::OtherOrder`].
pub(crate) fn verify(channel: &mut Channel, weights: &[Weight]) -> Result<()> {
    let checksums = weights
        .iter()
        .map(Weight::checksum)
        .collect::<Result<Vec<_>>>()?;
    let all = checksums
        .iter()
        .fold(DigestWriter::new(), |all, digest| all.u64(digest.0))
        .finish();
    let rank = channel.rank();
    // One number a rank; all weights' numbers travel only where ranks differ.
    if differing(&channel.collect_in_order(&[exact(all.0)])?, 0, Rank(0)).is_empty() {
        return Ok(());
    }
    let checksums: Vec<_> = checksums.iter().map(|digest| exact(digest.0)).collect();
    let all = channel.collect(&checksums)?;
    for (index, weight) in weights.iter().enumerate() {
        let differing = differing(&all, index, Rank(0));
        if !differing.is_empty() {
            return Err(Error::ReplicasDiffer {
                rank,
                name: weight.name.clone(),
                differing,
            });
        }
    }
    Ok(())
}
