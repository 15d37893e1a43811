//! Proof that every rank's weights have the same bits.

use polarshard_partition::{Digest, DigestWriter, Rank};

use crate::channel::Channel;
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
    if odd_ones(&channel.collect_in_order(&[exact(all)])?, 0).is_empty() {
        return Ok(());
    }
    let all = channel.collect(&checksums.into_iter().map(exact).collect::<Vec<_>>())?;
    for (index, weight) in weights.iter().enumerate() {
        let differing = odd_ones(&all, index);
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

/// 52 bits, which an f64 holds exactly.
fn exact(digest: Digest) -> f64 {
    (digest.0 >> 12) as f64
}

/// The ranks whose number at `index` is not that of rank 0.
fn odd_ones(by_rank: &[Vec<f64>], index: usize) -> Vec<Rank> {
    (0..by_rank.len())
        .filter(|rank| by_rank[*rank][index] != by_rank[0][index])
        .map(Rank)
        .collect()
}
