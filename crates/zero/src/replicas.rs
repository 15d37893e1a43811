//! Proof that every rank's weights have the same bits.

use polarshard_partition::Rank;

use crate::channel::Channel;
use crate::error::{Error, Result};
use crate::weights::Weight;

/// Compares a checksum of each weight over ranks.
///
/// # Errors
/// [`Error::ReplicasDiffer`] naming the first weight that differs and the ranks that have it otherwise than rank 0.
pub(crate) fn verify(channel: &mut Channel, weights: &[Weight]) -> Result<()> {
    // 52 bits each, which an f64 holds exactly.
    let mine = weights
        .iter()
        .map(|weight| Ok((weight.checksum()?.0 >> 12) as f64))
        .collect::<Result<Vec<_>>>()?;
    let all = channel.collect(&mine)?;
    for (index, weight) in weights.iter().enumerate() {
        let differing: Vec<_> = (0..all.len())
            .filter(|rank| all[*rank][index] != all[0][index])
            .map(Rank)
            .collect();
        if !differing.is_empty() {
            return Err(Error::ReplicasDiffer {
                rank: channel.rank(),
                name: weight.name.clone(),
                differing,
            });
        }
    }
    Ok(())
}
